// Fuzzes the readers of tensor files: any bytes are read or refused with an Error. scripts/fuzz
// builds it once for each format, so that each fuzzer explores one reader.
#include <headroom/error.h>

#include <cstdint>
#include <cstdlib>

#include "files/tensor_file.h"
#include "tests/fuzz/memory_file.h"

namespace {

namespace hf = headroom::files;

// Elements of larger tensors are not read: a few kilobytes may decompress to gigabytes, which takes
// time and reaches no new code.
constexpr int64_t kMostElements = int64_t{1} << 18;

void read_all(const hf::File& file, const hf::Contents& contents) {
  for (const hf::Tensor& tensor : contents.tensors) {
    if (tensor.count > kMostElements) continue;
    int64_t seen = 0;
    uint8_t sum = 0;
    hf::read_elements(file, tensor, 0, tensor.count, [&](const void* data, int64_t count) {
      const auto* bytes = static_cast<const uint8_t*>(data);
      const size_t size = static_cast<size_t>(count) * headroom::size_of(tensor.dtype);
      for (size_t i = 0; i < size; ++i)
        sum = static_cast<uint8_t>(sum + bytes[i]);  // reads every byte
      seen += count;
    });
    if (seen != tensor.count) abort();  // a reader returns all elements or throws
    static volatile uint8_t sink;
    sink = sum;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const headroom::MemoryFile memory(data, size);
  try {
    const hf::File file(memory.path());
    read_all(file, hf::HEADROOM_FUZZ_READER(file, {size % 2 == 1}));
  } catch (const headroom::Error&) {
  }
  return 0;
}
