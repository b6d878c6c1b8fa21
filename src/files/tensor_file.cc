#include "files/tensor_file.h"

#include <algorithm>
#include <cstring>

#include "files/npy.h"
#include "files/zip.h"

namespace headroom::files {
namespace {

// inflate_member() may split an element between two pieces, so pieces are copied into whole blocks.
void read_packed(const File& file, const Tensor& tensor, const Block& block) {
  const size_t size = size_of(tensor.dtype);
  const BlockBuffer buffer = make_block_buffer();
  size_t filled = 0;
  uint64_t skip = tensor.skip;
  const auto flush = [&] {
    if (filled == 0) return;
    if (tensor.big_endian) swap_bytes(buffer.get(), filled, size);
    block(buffer.get(), static_cast<int64_t>(filled / size));
    filled = 0;
  };
  const ZipMember member = {tensor.name,
                            true,
                            tensor.offset,
                            tensor.stored_bytes,
                            tensor.skip + static_cast<uint64_t>(tensor.count) * size,
                            tensor.crc32};
  inflate_member(file, member, [&](const char* data, size_t bytes) {
    const size_t skipped = std::min<uint64_t>(skip, bytes);
    skip -= skipped;
    data += skipped;
    bytes -= skipped;
    while (bytes > 0) {
      const size_t now = std::min(bytes, kBlockBytes - filled);
      std::memcpy(buffer.get() + filled, data, now);
      filled += now;
      data += now;
      bytes -= now;
      if (filled == kBlockBytes) flush();
    }
    return true;
  });
  flush();
}

// Recognises the format by its first bytes. safetensors has no magic number and is tried last.
Contents read_contents(const File& file, const OpenOptions& options) {
  const std::string magic = file.read_text(0, std::min<uint64_t>(file.size(), 6));
  if (magic == "\x93NUMPY") return read_npy(file, options);
  if (magic.starts_with("PK\x03\x04") || magic.starts_with("PK\x05\x06")) {
    return read_npz(file, options);
  }
  return read_safetensors(file, options);
}

}  // namespace

TensorFile::TensorFile(const std::string& path, const OpenOptions& options)
    : file_(path), contents_(read_contents(file_, options)) {
  if (!contents_.tensors.empty() || contents_.left_out.empty()) return;
  const LeftOut& first = contents_.left_out.front();
  file_.refuse("holds no tensor of a supported type: " + in_quotes(first.name) + " " +
               unsupported_type(first.dtype) + ".");
}

void read_elements(const File& file, const Tensor& tensor, int64_t first, int64_t count,
                   const Block& block) {
  tensor.packed ? read_packed(file, tensor, block) : read_plain(file, tensor, first, count, block);
}

}  // namespace headroom::files
