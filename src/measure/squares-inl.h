// How the squares of each element type are added, for one SIMD target. All targets add the same
// element to the same lane and round the same way, so that all give the same bits.
#if defined(HEADROOM_SRC_MEASURE_SQUARES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_MEASURE_SQUARES_INL_H_
#undef HEADROOM_SRC_MEASURE_SQUARES_INL_H_
#else
#define HEADROOM_SRC_MEASURE_SQUARES_INL_H_
#endif

#include <bit>
#include <type_traits>

#include "core/convert-inl.h"
#include "measure/scalar.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

using DD = hn::CappedTag<double, 8>;
using DFHalf = hn::Rebind<float, DD>;  // as many floats as there are lanes in a DD
constexpr size_t kDoubleLanes = hn::MaxLanes(DD());

// A group of elements as they are in memory, in vectors of integer lanes. Lanes are signed because
// x86 has the comparisons and maxima of signed integers at every width.
template <typename T>
struct Group {
  using Bits = std::make_signed_t<typename Element<T>::Bits>;
  using D = hn::CappedTag<Bits, 64 / sizeof(Bits)>;
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr size_t kVectors = kGroup / kLanes;

  // An implicit one would not be compiled for this target, which ARM's vectors require.
  HWY_INLINE Group() {}

  hn::Vec<D> vectors[kVectors];
};

// DSum is the type of the sums: FP32 for 16-bit elements, whose sums are moved to double after each
// block, and double for the others.
#if HWY_TARGET == HWY_SCALAR

template <typename T>
struct Squares {
  using DSum = hn::CappedTag<std::conditional_t<sizeof(T) == 2, float, double>, 16>;
  static constexpr size_t kSums = kGroup;
  static HWY_INLINE void add(const Group<T>& group, hn::Vec<DSum> (&sums)[kSums]) {
    using Sum = hn::TFromD<DSum>;
    for (size_t i = 0; i < kGroup; ++i) {
      const Sum v = static_cast<Sum>(widen(std::bit_cast<T>(hn::GetLane(group.vectors[i]))));
      // The lane that the vector targets use; see Squares<bf16> below.
      const size_t lane = std::is_same_v<T, bf16> ? i % 2 * (kGroup / 2) + i / 2 : i;
      sums[lane] = hn::Set(DSum(), v * v + hn::GetLane(sums[lane]));
    }
  }
};

#else

template <typename T>
struct Squares;

// The square of an f16 is exact in FP32, so a fused multiply-add rounds like an add.
template <>
struct Squares<f16> {
  using DSum = DF;
  static constexpr size_t kSums = kGroup / kFloatLanes;
  static HWY_INLINE void add(const Group<f16>& group, hn::Vec<DF> (&sums)[kSums]) {
    const DF df;
    const hn::Rebind<uint16_t, DF> d16;
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; i += 2) {
      const auto both = hn::BitCast(hn::Twice<decltype(d16)>(), group.vectors[i / 2]);
      const auto low = half_to_float(df, hn::LowerHalf(d16, both));
      const auto high = half_to_float(df, hn::UpperHalf(d16, both));
      sums[i] = hn::MulAdd(low, low, sums[i]);
      sums[i + 1] = hn::MulAdd(high, high, sums[i + 1]);
    }
  }
};

// Elements with an even index are added in the first half of the lanes, the others in the second: a
// 32-bit word holds one of each, and either becomes a float with a single shift or mask.
template <>
struct Squares<bf16> {
  using DSum = DF;
  static constexpr size_t kSums = kGroup / kFloatLanes;
  static HWY_INLINE void add(const Group<bf16>& group, hn::Vec<DF> (&sums)[kSums]) {
    const DF df;
    const hn::Rebind<uint32_t, DF> du;
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums / 2; ++i) {
      const auto word = hn::BitCast(du, group.vectors[i]);
      const auto even = hn::BitCast(df, hn::ShiftLeft<16>(word));
      const auto odd = hn::BitCast(df, hn::And(word, hn::Set(du, 0xFFFF0000u)));
      sums[i] = hn::Add(hn::Mul(even, even), sums[i]);
      sums[i + kSums / 2] = hn::Add(hn::Mul(odd, odd), sums[i + kSums / 2]);
    }
  }
};

// The square of a float is exact in double, so a fused multiply-add rounds like an add.
template <>
struct Squares<float> {
  using DSum = DD;
  static constexpr size_t kSums = kGroup / kDoubleLanes;
  static HWY_INLINE void add(const Group<float>& group, hn::Vec<DD> (&sums)[kSums]) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; i += 2) {
      const auto both = hn::BitCast(DF(), group.vectors[i / 2]);
      const auto low = hn::PromoteTo(DD(), hn::LowerHalf(DFHalf(), both));
      const auto high = hn::PromoteTo(DD(), hn::UpperHalf(DFHalf(), both));
      sums[i] = hn::MulAdd(low, low, sums[i]);
      sums[i + 1] = hn::MulAdd(high, high, sums[i + 1]);
    }
  }
};

template <>
struct Squares<double> {
  using DSum = DD;
  static constexpr size_t kSums = kGroup / kDoubleLanes;
  static HWY_INLINE void add(const Group<double>& group, hn::Vec<DD> (&sums)[kSums]) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; ++i) {
      const auto v = hn::BitCast(DD(), group.vectors[i]);
      sums[i] = hn::Add(hn::Mul(v, v), sums[i]);
    }
  }
};

#endif

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_MEASURE_SQUARES_INL_H_
