// The .npz format: a zip archive of .npy files, stored (savez) or deflated (savez_compressed).
#include <algorithm>
#include <unordered_set>

#include "files/npy.h"
#include "files/tensor_file.h"
#include "files/zip.h"

namespace headroom::files {
namespace {

// The member's .npy header, or a prefix of the member that contains it.
std::string header_of(const File& file, const ZipMember& member) {
  if (!member.deflated) {
    return file.read_text(member.offset, std::min<uint64_t>(member.bytes, kLongestNpyHeader));
  }
  std::string start;
  // Inflate no more than the header needs.
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
    if (!member.name.ends_with(".npy")) {
      contents.left_out.push_back({member.name, "not .npy", 0});
      continue;
    }
    const std::string name = member.name.substr(0, member.name.size() - 4);
    if (!names.insert(name).second) file.refuse("names " + in_quotes(name) + " twice.");
    NpyHeader header = parse_npy(header_of(file, member), member.bytes, options);
    if (!header.error.empty()) {
      file.refuse("holds " + in_quotes(name) + ", which " + header.error + ".");
    }
    if (!header.supported) {
      contents.left_out.push_back({name, header.descr, 0});
      continue;
    }
    Tensor& tensor = contents.tensors.emplace_back(std::move(header.tensor));
    tensor.name = name;
    tensor.packed = member.deflated;
    // A stored tensor is read from its first element, a deflated one only from the member's start.
    const size_t skipped_in_file = member.deflated ? 0 : header.bytes;
    tensor.offset = member.offset + skipped_in_file;
    tensor.stored_bytes = member.stored_bytes - skipped_in_file;
    tensor.skip = header.bytes;
    tensor.crc32 = member.crc32;
  }
  if (names.empty()) {
    file.refuse(
        "is a zip archive without .npy members; of a PyTorch .pt file, save the tensors as "
        "safetensors instead.");
  }
  return contents;
}

}  // namespace headroom::files
