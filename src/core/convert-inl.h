// Loads and stores that convert between 16-bit storage and float lanes, for one SIMD target.
//
// Highway's own 16-bit conversions are used only where the instruction set has them (F16C and
// later), because before that some releases turn fp16 inf into a finite number and truncate bf16.
// Everywhere else the bits are worked on as integers. float16.h is the reference.
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

// At most 16 float lanes, so that 32 elements are always a whole number of vectors.
using DF = hn::CappedTag<float, 16>;
using DU32 = hn::Rebind<uint32_t, DF>;
using DI32 = hn::Rebind<int32_t, DF>;
using DU16 = hn::Rebind<uint16_t, DF>;
using VF = hn::Vec<DF>;
constexpr size_t kFloatLanes = hn::MaxLanes(DF());

#undef HEADROOM_NATIVE_F16
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define HEADROOM_NATIVE_F16 1
#else
#define HEADROOM_NATIVE_F16 0
#endif

HWY_INLINE hn::Vec<DI32> magnitude_bits(VF v) {
  const DI32 di;
  return hn::And(hn::BitCast(di, v), hn::Set(di, 0x7FFFFFFF));
}

HWY_INLINE void store_low_half(hn::Vec<DU32> bits, uint16_t* to) {
  const DU16 d16;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(DI32(), bits)), d16, to);
}

HWY_INLINE VF load_float(const float* from) { return hn::LoadU(DF(), from); }

HWY_INLINE VF load_float(const bf16* from) {
  const DU32 du;
  const auto bits =
      hn::PromoteTo(du, hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
}

HWY_INLINE VF load_float(const f16* from) {
#if HEADROOM_NATIVE_F16
  const hn::Rebind<hwy::float16_t, DF> dh;
  return hn::PromoteTo(DF(), hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from)));
#else
  const DF df;
  const DU32 du;
  const DI32 di;
  const auto half = hn::PromoteTo(du, hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(from)));
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(half, hn::Set(du, 0x7FFFu));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  // Read with float's exponent bias the value is too small by 2^112; this also scales subnormals.
  const auto finite = hn::BitCast(
      du, hn::Mul(hn::BitCast(df, shifted), hn::BitCast(df, hn::Set(du, 0x77800000u))));
  const auto special = hn::Or(shifted, hn::Set(du, 0x7F800000u));
  const auto quiet = hn::Or(special, hn::Set(du, 0x00400000u));
  const auto smagnitude = hn::BitCast(di, magnitude);
  auto bits = hn::IfThenElse(hn::RebindMask(du, hn::Gt(smagnitude, hn::Set(di, 0x7BFF))), special,
                             finite);
  bits = hn::IfThenElse(hn::RebindMask(du, hn::Gt(smagnitude, hn::Set(di, 0x7C00))), quiet, bits);
  return hn::BitCast(df, hn::Or(sign, bits));
#endif
}

HWY_INLINE void store_float(VF v, float* to) { hn::StoreU(v, DF(), to); }

HWY_INLINE void store_float(VF v, bf16* to) {
  const DU32 du;
  const auto bits = hn::BitCast(du, v);
  const auto high = hn::ShiftRight<16>(bits);
  const auto bias = hn::Add(hn::Set(du, 0x7FFFu), hn::And(high, hn::Set(du, 1u)));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, bias));
  const auto is_nan = hn::Gt(magnitude_bits(v), hn::Set(DI32(), 0x7F800000));
  const auto quiet = hn::Or(high, hn::Set(du, 0x0040u));
  store_low_half(hn::IfThenElse(hn::RebindMask(du, is_nan), quiet, rounded),
                 reinterpret_cast<uint16_t*>(to));
}

HWY_INLINE void store_float(VF v, f16* to) {
#if HEADROOM_NATIVE_F16
  const hn::Rebind<hwy::float16_t, DF> dh;
  hn::StoreU(hn::DemoteTo(dh, v), dh, reinterpret_cast<hwy::float16_t*>(to));
#else
  const DF df;
  const DU32 du;
  const DI32 di;
  const auto bits = hn::BitCast(du, v);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
  const auto smagnitude = magnitude_bits(v);
  const auto magnitude = hn::BitCast(du, smagnitude);
  const auto below = [&](int32_t limit) HWY_ATTR {
    return hn::RebindMask(du, hn::Gt(hn::Set(di, limit), smagnitude));
  };
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(
      hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000u - 0xFFFu)), odd));
  const auto shifted = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3F000000u));
  const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3FFu));
  auto half = hn::IfThenElse(below(0x38800000), subnormal, normal);
  half = hn::IfThenElse(below(0x477FF000), half, hn::Set(du, 0x7C00u));
  half = hn::IfThenElse(below(0x7F800001), half, hn::Or(payload, hn::Set(du, 0x7E00u)));
  store_low_half(hn::Or(sign, half), reinterpret_cast<uint16_t*>(to));
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_CORE_CONVERT_INL_H_
