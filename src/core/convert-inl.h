// Loads and stores that convert between 16-bit storage and float lanes, for one SIMD target.
//
// Highway's own 16-bit conversions are used only where the instruction set has them (F16C and
// later): its emulation turns fp16 inf into a finite number and truncates bf16 in some releases.
// Everywhere else the conversions use integer operations. The scalar functions in
// headroom/float16.h are the reference for all of them.
#if defined(HEADROOM_SRC_CORE_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_CORE_CONVERT_INL_H_
#undef HEADROOM_SRC_CORE_CONVERT_INL_H_
#else
#define HEADROOM_SRC_CORE_CONVERT_INL_H_
#endif

#include <headroom/float16.h>
#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 float lanes, so that 32 elements are always a whole number of vectors. The functions
// below take the tag of the float vector as a parameter, so that callers can process the end of a
// tensor with narrower vectors.
using DF = hn::CappedTag<float, 16>;
constexpr size_t kFloatLanes = hn::MaxLanes(DF());

template <class D>
using BitsOf = hn::Vec<hn::Rebind<uint32_t, D>>;
template <class D>
using HalvesOf = hn::Vec<hn::Rebind<uint16_t, D>>;

#undef HEADROOM_NATIVE_F16
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define HEADROOM_NATIVE_F16 1
#else
#define HEADROOM_NATIVE_F16 0
#endif

// The bits without the sign. As signed integers they are ordered like the magnitudes.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<int32_t, D>> magnitude_bits(D, hn::Vec<D> v) {
  const hn::Rebind<int32_t, D> di;
  return hn::And(hn::BitCast(di, v), hn::Set(di, 0x7FFFFFFF));
}

// The lower 16 bits of each lane. The upper ones are zero, so DemoteTo, which saturates, and
// TruncateTo give the same result. TruncateTo is one instruction on AVX-512 only; DemoteTo is
// faster at the other widths.
template <class D>
HWY_INLINE HalvesOf<D> low_halves(D, BitsOf<D> bits) {
  const hn::Rebind<uint16_t, D> d16;
  if constexpr (hn::MaxLanes(D()) == 16) {
    return hn::TruncateTo(d16, bits);
  } else {
    return hn::DemoteTo(d16, hn::BitCast(hn::Rebind<int32_t, D>(), bits));
  }
}

template <class D>
HWY_INLINE void store_halves(D, HalvesOf<D> bits, void* to) {
  hn::StoreU(bits, hn::Rebind<uint16_t, D>(), static_cast<uint16_t*>(to));
}

template <class D>
HWY_INLINE HalvesOf<D> load_halves(D, const void* from) {
  return hn::LoadU(hn::Rebind<uint16_t, D>(), static_cast<const uint16_t*>(from));
}

template <class D>
HWY_INLINE hn::Vec<D> half_to_float(D df, HalvesOf<D> bits16) {
#if HEADROOM_NATIVE_F16
  return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits16));
#else
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const auto half = hn::PromoteTo(du, bits16);
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(half, hn::Set(du, 0x7FFFu));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  // Shifted into a float's exponent and mantissa fields, the value is too small by the difference
  // of the exponent biases: 127 - 15 = 112. The product with 2^112 (0x77800000) is exact and also
  // normalises subnormal halves.
  const auto finite =
      hn::BitCast(du, hn::Mul(hn::BitCast(df, shifted), hn::BitCast(df, hn::Set(du, 0x77800000u))));
  // Inf and NaN get float's all-ones exponent; NaN also the quiet bit.
  const auto special = hn::Or(shifted, hn::Set(du, 0x7F800000u));
  const auto quiet = hn::Or(special, hn::Set(du, 0x00400000u));
  const auto above = [&](int32_t limit) HWY_ATTR {
    return hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, limit)));
  };
  auto bits = hn::IfThenElse(above(0x7BFF), special, finite);
  bits = hn::IfThenElse(above(0x7C00), quiet, bits);
  return hn::BitCast(df, hn::Or(sign, bits));
#endif
}

template <class D>
HWY_INLINE hn::Vec<D> load_float(D df, const float* from) {
  return hn::LoadU(df, from);
}
template <class D>
HWY_INLINE hn::Vec<D> load_float(D df, const f16* from) {
  return half_to_float(df, load_halves(df, from));
}
template <class D>
HWY_INLINE hn::Vec<D> load_float(D df, const bf16* from) {
  const auto bits = hn::PromoteTo(hn::Rebind<uint32_t, D>(), load_halves(df, from));
  return hn::BitCast(df, hn::ShiftLeft<16>(bits));
}

template <class D>
HWY_INLINE void store_float(D df, hn::Vec<D> v, float* to) {
  hn::StoreU(v, df, to);
}

// Adds `bias` (up to 0xFFFF) to the bits of `v` and stores the upper halves as bf16: the bias
// decides how the lower 16 bits are rounded. NaN is made quiet instead, since the addition could
// turn it into inf or change its sign.
template <class D>
HWY_INLINE void store_biased(D df, hn::Vec<D> v, BitsOf<D> bias, bf16* to) {
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::BitCast(du, v);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  const auto rounded = hn::IfThenElse(is_nan, quiet, hn::Add(bits, bias));
  store_halves(df, low_halves(df, hn::ShiftRight<16>(rounded)), to);
}

// To nearest even: a bias of 0x7FFF rounds ties down, and one more where the result would be odd.
template <class D>
HWY_INLINE void store_float(D df, hn::Vec<D> v, bf16* to) {
  const hn::Rebind<uint32_t, D> du;
  const auto odd = hn::And(hn::ShiftRight<16>(hn::BitCast(du, v)), hn::Set(du, 1u));
  store_biased(df, v, hn::Add(odd, hn::Set(du, 0x7FFFu)), to);
}

// Rounds to the bits of f16, to nearest even.
template <class D>
HWY_INLINE HalvesOf<D> to_halves(D df, hn::Vec<D> v) {
#if HEADROOM_NATIVE_F16
  return hn::BitCast(hn::Rebind<uint16_t, D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
#else
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(du, v)), hn::Set(du, 0x8000u));
  const auto smagnitude = magnitude_bits(df, v);
  const auto magnitude = hn::BitCast(du, smagnitude);
  const auto below = [&](int32_t limit) HWY_ATTR {
    return hn::RebindMask(du, hn::Gt(hn::Set(di, limit), smagnitude));
  };
  // Normal halves: subtract 112 from the exponent (0x38000000) and round the lower 13 bits to
  // nearest even with a bias of 0xFFF, plus one where the result would be odd.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto normal =
      hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000u - 0xFFFu)), odd));
  // Subnormal halves: adding 0.5 moves their unit, 2^-24, to the last place of a float, so that the
  // addition itself rounds to nearest even.
  const auto shifted = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3F000000u));
  const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3FFu));
  auto half = hn::IfThenElse(below(0x38800000), subnormal, normal);  // 2^-14
  // 65520 and above round to inf.
  half = hn::IfThenElse(below(0x477FF000), half, hn::Set(du, 0x7C00u));
  half = hn::IfThenElse(below(0x7F800001), half, hn::Or(payload, hn::Set(du, 0x7E00u)));
  return low_halves(df, hn::Or(sign, half));
#endif
}

template <class D>
HWY_INLINE void store_float(D df, hn::Vec<D> v, f16* to) {
  store_halves(df, to_halves(df, v), to);
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_CORE_CONVERT_INL_H_
