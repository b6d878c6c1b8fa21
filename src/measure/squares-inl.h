// How the squares of each element type are added, for one SIMD target.
#if defined(HEADROOM_SRC_MEASURE_SQUARES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_MEASURE_SQUARES_INL_H_
#undef HEADROOM_SRC_MEASURE_SQUARES_INL_H_
#else
#define HEADROOM_SRC_MEASURE_SQUARES_INL_H_
#endif

#include <cstring>
#include <type_traits>

#include "core/convert-inl.h"
#include "measure/careful.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

using DD = hn::CappedTag<double, 8>;
using DFHalf = hn::Rebind<float, DD>;  // as many floats as there are lanes in a DD
constexpr size_t kDoubleLanes = hn::MaxLanes(DD());

// A group of elements as it lies in memory, in registers of integer lanes.
template <typename T>
struct Group {
  using Bits = typename Careful<T>::Bits;
  using D = hn::CappedTag<Bits, 64 / sizeof(Bits)>;
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr size_t kVectors = kGroup / kLanes;

  hn::Vec<D> vectors[kVectors];
};

// How the squares of a type are added: the type of the sums, and how lanes become numbers.
template <typename T>
struct Squares;

#if HWY_TARGET == HWY_SCALAR

template <typename T>
struct ScalarSquares {
  using DSum = hn::CappedTag<std::conditional_t<sizeof(T) == 2, float, double>, 16>;
  static constexpr size_t kSums = kGroup;
  static HWY_INLINE void add(const Group<T>& group, hn::Vec<DSum> (&sums)[kSums]) {
    using Sum = hn::TFromD<DSum>;
    for (size_t i = 0; i < kGroup; ++i) {
      const auto bits = hn::GetLane(group.vectors[i]);
      T x;
      std::memcpy(&x, &bits, sizeof(x));
      const Sum v = static_cast<Sum>(widen(x));
      const size_t lane = std::is_same_v<T, bf16> ? i % 2 * (kGroup / 2) + i / 2 : i;
      sums[lane] = hn::Set(DSum(), v * v + hn::GetLane(sums[lane]));
    }
  }
};
template <>
struct Squares<f16> : ScalarSquares<f16> {};
template <>
struct Squares<bf16> : ScalarSquares<bf16> {};
template <>
struct Squares<float> : ScalarSquares<float> {};
template <>
struct Squares<double> : ScalarSquares<double> {};

#else

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
      add_one(half_to_float(df, hn::LowerHalf(d16, both)), &sums[i]);
      add_one(half_to_float(df, hn::UpperHalf(d16, both)), &sums[i + 1]);
    }
  }
  // The product is exact, so fused or not is the same.
  static HWY_INLINE void add_one(hn::Vec<DF> v, hn::Vec<DF>* sum) { *sum = hn::MulAdd(v, v, *sum); }
};

// Elements with an even index are added in the first half of the lanes, the others in the second: a
// 32-bit word holds two of them, and each half of it is a float after one instruction.
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

template <>
struct Squares<float> {
  using DSum = DD;
  static constexpr size_t kSums = kGroup / kDoubleLanes;
  static HWY_INLINE void add(const Group<float>& group, hn::Vec<DD> (&sums)[kSums]) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; i += 2) {
      const auto both = hn::BitCast(DF(), group.vectors[i / 2]);
      add_one(hn::PromoteTo(DD(), hn::LowerHalf(DFHalf(), both)), &sums[i]);
      add_one(hn::PromoteTo(DD(), hn::UpperHalf(DFHalf(), both)), &sums[i + 1]);
    }
  }
  // The product is exact, so fused or not is the same.
  static HWY_INLINE void add_one(hn::Vec<DD> v, hn::Vec<DD>* sum) { *sum = hn::MulAdd(v, v, *sum); }
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
