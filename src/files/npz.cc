// .npz: a zip archive whose members are .npy files, stored (savez) or deflated (savez_compressed).
#include <algorithm>
#include <unordered_set>

#include "files/npy.h"
#include "files/tensor_file.h"
#include "files/zip.h"

namespace headroom::files {
namespace {

std::string first_bytes(const File& file, const ZipMember& member) {
  if (!member.deflated) {
    return file.read_text(member.offset, std::min<uint64_t>(member.bytes, kLongestNpyHeader));
  }
  std::string start;
  inflate_member(file, member, [&](const char* data, size_t bytes) {
    start.append(data, std::min(bytes, kLongestNpyHeader - start.size()));
    return start.size() < std::min(npy_header_bytes(start), kLongestNpyHeader);
  });
  return start;
}

}  // namespace

Contents read_npz(const File& file, const OpenOptions& options) {
  Contents contents;
  std::unordered_set<std::string> names;
  for (const ZipMember& member : read_zip(file)) {
    Tensor tensor;
    tensor.name = member.name;
    if (!tensor.name.ends_with(".npy")) {
      contents.left_out.push_back({member.name, "not .npy"});
      continue;
    }
    tensor.name.resize(tensor.name.size() - 4);
    const std::string who = "holds " + in_quotes(tensor.name) + ", which ";
    if (!names.insert(tensor.name).second)
      file.refuse("names " + in_quotes(tensor.name) + " twice.");
    NpyHeader header = parse_npy(first_bytes(file, member), member.bytes, options);
    if (!header.wrong.empty()) file.refuse(who + header.wrong + ".");
    if (!header.is_read) {
      contents.left_out.push_back({tensor.name, header.descr});
      continue;
    }
    tensor.dtype = header.dtype;
    tensor.shape = std::move(header.shape);
    tensor.count = header.count;
    tensor.big_endian = header.big_endian;
    tensor.packed = member.deflated;
    tensor.offset = member.offset + (member.deflated ? 0 : header.bytes);
    tensor.stored_bytes = member.stored_bytes - (member.deflated ? 0 : header.bytes);
    tensor.skip = header.bytes;
    tensor.crc32 = member.crc32;
    contents.tensors.push_back(std::move(tensor));
  }
  if (names.empty()) {
    file.refuse(
        "is a zip archive without .npy members; of a PyTorch .pt file, save the tensors as "
        "safetensors instead.");
  }
  return contents;
}

}  // namespace headroom::files
