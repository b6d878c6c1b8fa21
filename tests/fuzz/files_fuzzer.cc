// Any bytes as a file: it is read or refused with an Error, and nothing else happens. Built three
// times, each for one format (see scripts/fuzz), so that each fuzzer stays with its own.
#include <headroom/error.h>

#include <cstdint>
#include <cstdlib>

#include "files/tensor_file.h"
#include "tests/fuzz/memory_file.h"

namespace {

namespace hf = headroom::files;

// A few kilobytes may unpack to a lot; beyond this there is nothing new to find.
constexpr int64_t kEnough = int64_t{1} << 18;

void read_all(const hf::File& file, const hf::Contents& contents) {
  for (const hf::Tensor& tensor : contents.tensors) {
    if (tensor.count > kEnough) continue;
    int64_t seen = 0;
    uint8_t sum = 0;
    hf::read_elements(file, tensor, 0, tensor.count, [&](const void* data, int64_t count) {
      const auto* bytes = static_cast<const uint8_t*>(data);
      const size_t size = static_cast<size_t>(count) * headroom::size_of(tensor.dtype);
      for (size_t i = 0; i < size; ++i) sum = static_cast<uint8_t>(sum + bytes[i]);  // touch all
      seen += count;
    });
    if (seen != tensor.count) abort();  // all elements, or an Error
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
