// The inner loop of counting, as one table of functions per SIMD target.
#ifndef HEADROOM_SRC_INSPECT_KERNELS_H_
#define HEADROOM_SRC_INSPECT_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <limits>

namespace headroom::internal {

constexpr size_t kChunk = 1024;  // elements that are classified before they are counted

/// The range of the magnitudes in a chunk, as bit patterns.
struct ChunkRange {
  uint64_t largest = 0;                                      // finite
  uint64_t smallest = std::numeric_limits<uint64_t>::max();  // not zero
};

/// Maps elements to slots. The slot of a 16-bit element is its magnitude as bits; that of a wider
/// one is biased exponent * 16 + mantissa class, see cells.h. Subnormal numbers get the class of
/// their mantissa as it stands, without normalisation. `data` may have any alignment.
using ClassifyFunction = void (*)(const void* data, size_t count, uint16_t* slots,
                                  ChunkRange* range);

struct InspectKernels {
  ClassifyFunction classify[4];  // indexed by DType
};

/// The kernels of the SIMD target in use.
const InspectKernels& inspect_kernels();

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_INSPECT_KERNELS_H_
