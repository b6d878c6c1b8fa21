// Plain loops on integers. They are compiled once for each SIMD target because compilers vectorise
// them well, and far better with AVX2 than without.
#if defined(HEADROOM_SRC_INSPECT_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_INSPECT_KERNELS_INL_H_
#undef HEADROOM_SRC_INSPECT_KERNELS_INL_H_
#else
#define HEADROOM_SRC_INSPECT_KERNELS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "inspect/cells.h"
#include "inspect/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

template <typename Bits>
HWY_INLINE Bits magnitude_at(const char* p, size_t i) {
  Bits bits;
  std::memcpy(&bits, p + i * sizeof(Bits), sizeof(Bits));
  return static_cast<Bits>(bits & std::numeric_limits<Bits>::max());
}

// For the largest finite and the smallest nonzero magnitude. Masks instead of conditions, which
// keep GCC from vectorising.
template <typename Bits>
HWY_INLINE Bits finite_or_zero(Bits bits, Bits inf) {
  return static_cast<Bits>(bits & -static_cast<Bits>(bits < inf));
}
template <typename Bits>
HWY_INLINE Bits nonzero_or_max(Bits bits) {
  return static_cast<Bits>(bits |
                           (-static_cast<Bits>(bits == 0) & std::numeric_limits<Bits>::max()));
}

// Bits is a signed integer, which every target can compare.
template <typename Bits, int kBits, Bits kInf>
void slots(const void* from, size_t count, uint16_t* slot, ChunkRange* range) {
  const char* p = static_cast<const char*>(from);
  Bits largest = 0, smallest = std::numeric_limits<Bits>::max();
  for (size_t i = 0; i < count; ++i) {
    const Bits bits = magnitude_at<Bits>(p, i);
    const Bits mantissa = bits & ((Bits{1} << kBits) - 1);
    slot[i] = static_cast<uint16_t>((bits >> kBits << 4) + mantissa_class<kBits>(mantissa));
    largest = std::max(largest, finite_or_zero(bits, kInf));
    smallest = std::min(smallest, nonzero_or_max(bits));
  }
  range->add({static_cast<uint64_t>(largest), static_cast<uint64_t>(smallest)});
}

size_t repeats16(const void* from, size_t count) {
  const char* p = static_cast<const char*>(from);
  size_t repeats = 0;
  for (size_t begin = 0; begin + 1 < count; begin += 32768) {
    const size_t end = std::min(begin + 32768, count - 1);
    uint16_t here = 0;
    for (size_t i = begin; i < end; ++i) {
      here = static_cast<uint16_t>(
          here + (magnitude_at<int16_t>(p, i) == magnitude_at<int16_t>(p, i + 1)));
    }
    repeats += here;
  }
  return repeats;
}

// Counter is as wide as Bits, so that lanes need not be widened; hence the limit on count.
template <typename Bits, typename Counter>
void fates(const void* from, size_t count, const BitLimits& limits, Fates* out) {
  const char* p = static_cast<const char*>(from);
  const auto flush = static_cast<Bits>(limits.flush), normal = static_cast<Bits>(limits.normal),
             overflow = static_cast<Bits>(limits.overflow), inf = static_cast<Bits>(limits.inf);
  Counter up_to_flush = 0, zeros = 0, below_normal = 0, below_overflow = 0, finite = 0, numbers = 0;
  Bits largest = 0, smallest = std::numeric_limits<Bits>::max();
  for (size_t i = 0; i < count; ++i) {
    const Bits bits = magnitude_at<Bits>(p, i);
    zeros = static_cast<Counter>(zeros + (bits == 0));
    up_to_flush = static_cast<Counter>(up_to_flush + (bits <= flush));
    below_normal = static_cast<Counter>(below_normal + (bits < normal));
    below_overflow = static_cast<Counter>(below_overflow + (bits < overflow));
    finite = static_cast<Counter>(finite + (bits < inf));
    numbers = static_cast<Counter>(numbers + (bits <= inf));
    largest = std::max(largest, finite_or_zero(bits, inf));
    smallest = std::min(smallest, nonzero_or_max(bits));
  }
  out->flushed += static_cast<int64_t>(up_to_flush - zeros);
  out->subnormal += static_cast<int64_t>(below_normal - up_to_flush);
  out->overflow += static_cast<int64_t>(finite - below_overflow);
  out->zeros += static_cast<int64_t>(zeros);
  out->infs += static_cast<int64_t>(numbers - finite);
  out->nans += static_cast<int64_t>(count - numbers);
  out->range.add({static_cast<uint64_t>(largest), static_cast<uint64_t>(smallest)});
}

const InspectKernels* inspect_kernels_for_target() {
  static constexpr InspectKernels kKernels = {&slots<int32_t, 23, 0x7F800000>,
                                              &slots<int64_t, 52, 0x7FF0000000000000>,
                                              &repeats16,
                                              &fates<int16_t, uint16_t>,
                                              &fates<int32_t, uint32_t>,
                                              &fates<int64_t, uint64_t>};
  return &kKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif
