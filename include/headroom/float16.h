// The two 16-bit formats, as plain storage types with exact conversions.
//
// Both conversions from float round to nearest, ties to even. Subnormals are kept, values that
// round beyond the largest finite number become inf, and NaN stays NaN (made quiet). These inline
// functions are the reference for every SIMD and GPU path; tests compare all 65,536 patterns.
#ifndef HEADROOM_FLOAT16_H_
#define HEADROOM_FLOAT16_H_

#include <headroom/export.h>

#include <cstdint>
#include <cstring>

namespace headroom {
namespace internal {

HEADROOM_HOST_DEVICE inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HEADROOM_HOST_DEVICE inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

HEADROOM_HOST_DEVICE inline float half_bits_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // inf, or NaN made quiet
    const uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
    return bits_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13) | quiet);
  }
  // Normal: 0x38000000 is the difference of the exponent biases, 112, in a float's exponent field.
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: magnitude x 2^-24, exact in float.
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return bits_float(sign | float_bits(value));
}

HEADROOM_HOST_DEVICE inline uint16_t float_to_half_bits(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {  // NaN: keep the top of the payload, make it quiet
    return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  }
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // from 65520: inf
  // Normal half: subtracts 112 from the exponent and drops 13 bits. Adding 0xFFF, and one more
  // where the result would be odd, rounds to nearest even.
  if (magnitude >= 0x38800000u) {
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + odd) >> 13));
  }
  // Subnormal half: adding 0.5 puts the unit 2^-24 in the last place of a float, so that the
  // addition itself rounds to nearest even.
  const float shifted = bits_float(magnitude) + 0.5f;
  return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3F000000u));
}

HEADROOM_HOST_DEVICE inline float bfloat_bits_to_float(uint16_t bits) {
  return bits_float(static_cast<uint32_t>(bits) << 16);
}

HEADROOM_HOST_DEVICE inline uint16_t float_to_bfloat_bits(float value) {
  const uint32_t bits = float_bits(value);
  // NaN: keep the upper half, make it quiet.
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  // Drops 16 bits. Adding 0x7FFF, and one more where the result would be odd, rounds to nearest
  // even.
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace internal

/// IEEE 754 binary16: 11 bits of precision, finite to 65504, smallest number 2^-24.
struct f16 {
  uint16_t bits;

  f16() = default;
  /// Rounds to nearest even; from 65520 on to inf. NaN stays NaN.
  HEADROOM_HOST_DEVICE explicit f16(float value) : bits(internal::float_to_half_bits(value)) {}
  /// Exact.
  HEADROOM_HOST_DEVICE explicit operator float() const {
    return internal::half_bits_to_float(bits);
  }
  /// The number with these bits.
  HEADROOM_HOST_DEVICE static f16 from_bits(uint16_t bits) {
    f16 value;
    value.bits = bits;
    return value;
  }
};

/// bfloat16: the upper half of a float. 8 bits of precision, float's range.
struct bf16 {
  uint16_t bits;

  bf16() = default;
  /// Rounds to nearest even. NaN stays NaN.
  HEADROOM_HOST_DEVICE explicit bf16(float value) : bits(internal::float_to_bfloat_bits(value)) {}
  /// Exact.
  HEADROOM_HOST_DEVICE explicit operator float() const {
    return internal::bfloat_bits_to_float(bits);
  }
  /// The number with these bits.
  HEADROOM_HOST_DEVICE static bf16 from_bits(uint16_t bits) {
    bf16 value;
    value.bits = bits;
    return value;
  }
};

static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2, "16-bit storage types");

}  // namespace headroom

#endif  // HEADROOM_FLOAT16_H_
