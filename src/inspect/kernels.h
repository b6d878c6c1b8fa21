// The inner loops of counting, one table of which exists per SIMD target.
#ifndef HEADROOM_SRC_INSPECT_KERNELS_H_
#define HEADROOM_SRC_INSPECT_KERNELS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace headroom::internal {

constexpr size_t kChunk = 1024;  // elements that are classified before they are counted

/// A range of magnitudes, as bits.
struct ChunkRange {
  uint64_t largest = 0;                                      // that is finite
  uint64_t smallest = std::numeric_limits<uint64_t>::max();  // that is not zero

  void add(const ChunkRange& other) {
    largest = std::max(largest, other.largest);
    smallest = std::min(smallest, other.smallest);
  }
};

/// Magnitudes, as bits, at which the outcome changes: |x| <= flush, < normal, >= overflow, >= inf.
struct BitLimits {
  uint64_t flush;
  uint64_t normal;
  uint64_t overflow;
  uint64_t inf;
};

/// What a cast makes of elements, and the elements that are special already.
struct Fates {
  int64_t flushed = 0;
  int64_t subnormal = 0;
  int64_t overflow = 0;
  int64_t zeros = 0;
  int64_t infs = 0;
  int64_t nans = 0;
  ChunkRange range;

  void add(const Fates& other) {
    flushed += other.flushed;
    subnormal += other.subnormal;
    overflow += other.overflow;
    zeros += other.zeros;
    infs += other.infs;
    nans += other.nans;
    range.add(other.range);
  }
};

struct InspectKernels {
  /// slot[i] = biased exponent x 16 + class of the mantissa. Any alignment.
  void (*slots32)(const void* p, size_t count, uint16_t* slots, ChunkRange* range);
  void (*slots64)(const void* p, size_t count, uint16_t* slots, ChunkRange* range);
  /// How many neighbours among 16-bit elements are equal.
  size_t (*repeats16)(const void* p, size_t count);
  /// Counts the outcomes of at most 65,535 elements.
  void (*fates16)(const void* p, size_t count, const BitLimits& limits, Fates* fates);
  void (*fates32)(const void* p, size_t count, const BitLimits& limits, Fates* fates);
  void (*fates64)(const void* p, size_t count, const BitLimits& limits, Fates* fates);
};

/// The kernels of the SIMD target in use.
const InspectKernels& inspect_kernels();

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_INSPECT_KERNELS_H_
