// Reads elements that are stored uncompressed, as in safetensors and .npy.
#include <algorithm>
#include <new>

#include "files/tensor_file.h"

namespace headroom::files {

void AlignedDelete::operator()(char* p) const { ::operator delete (p, std::align_val_t{64}); }

BlockBuffer make_block_buffer() {
  return BlockBuffer(static_cast<char*>(::operator new (kBlockBytes, std::align_val_t{64})));
}

void swap_bytes(char* data, size_t bytes, size_t size) {
  for (size_t i = 0; i + size <= bytes; i += size) std::reverse(data + i, data + i + size);
}

void read_plain(const File& file, const Tensor& tensor, int64_t first, int64_t count,
                const Block& block) {
  const size_t size = size_of(tensor.dtype);
  const BlockBuffer buffer = make_block_buffer();
  uint64_t offset = tensor.offset + static_cast<uint64_t>(first) * size;
  for (uint64_t left = static_cast<uint64_t>(count) * size; left > 0;) {
    const size_t now = std::min<uint64_t>(left, kBlockBytes);
    file.read(offset, buffer.get(), now);
    if (tensor.big_endian) swap_bytes(buffer.get(), now, size);
    block(buffer.get(), static_cast<int64_t>(now / size));
    offset += now;
    left -= now;
  }
}

}  // namespace headroom::files
