// Plain integer loops, compiled once per SIMD target: compilers vectorise them, and the result is
// much faster with AVX2 than with the baseline instruction set.
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

// Bits is a signed integer of the element's size: every target can compare signed integers, and the
// sign bit has been cleared.
template <typename Bits, DType kDType>
void classify(const void* data, size_t count, uint16_t* slots, ChunkRange* range) {
  constexpr Layout kLayout = layout_of(kDType);
  [[maybe_unused]] constexpr int kMantissaBits = kLayout.mantissa_bits;
  constexpr auto kInf = static_cast<Bits>(kLayout.inf());
  constexpr Bits kMax = std::numeric_limits<Bits>::max();
  const char* p = static_cast<const char*>(data);
  Bits largest = 0;
  Bits smallest = kMax;
  for (size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, p + i * sizeof(Bits), sizeof(Bits));
    bits = static_cast<Bits>(bits & kMax);
    if constexpr (sizeof(Bits) == sizeof(uint16_t)) {
      slots[i] = static_cast<uint16_t>(bits);
    } else {
      const Bits mantissa = bits & ((Bits{1} << kMantissaBits) - 1);
      slots[i] = static_cast<uint16_t>((bits >> kMantissaBits << 4) +
                                       mantissa_class<kMantissaBits>(mantissa));
    }
    // Masks instead of conditional expressions, which GCC does not vectorise here.
    const auto finite = static_cast<Bits>(bits & -static_cast<Bits>(bits < kInf));
    const auto nonzero = static_cast<Bits>(bits | (-static_cast<Bits>(bits == 0) & kMax));
    largest = std::max(largest, finite);
    smallest = std::min(smallest, nonzero);
  }
  range->largest = std::max(range->largest, static_cast<uint64_t>(largest));
  range->smallest = std::min(range->smallest, static_cast<uint64_t>(smallest));
}

const InspectKernels* inspect_kernels_for_target() {
  static constexpr InspectKernels kKernels = {
      {&classify<int16_t, DType::kF16>, &classify<int16_t, DType::kBF16>,
       &classify<int32_t, DType::kF32>, &classify<int64_t, DType::kF64>}};
  return &kKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif
