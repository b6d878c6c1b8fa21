// Compact formats of masters and moments (StateFormat), as scalar functions: the reference for the
// SIMD kernels and the code of CUDA kernels. docs/state.md describes the formats.
//
// What a format cannot hold is rounded at random, up or down with the right mean. Rounding to
// nearest would lose every change smaller than half a unit: a second moment with beta2 = 0.999
// changes by 0.1 % in a step, far less than a unit of 8 or 16 bits, and would never decay.
#ifndef HEADROOM_SRC_APPLY_FORMATS_H_
#define HEADROOM_SRC_APPLY_FORMATS_H_

#include <headroom/float16.h>

#include <cstdint>
#include <type_traits>

namespace headroom::internal {

constexpr uint32_t kMagnitude = 0x7FFFFFFFu;  // the bits of a float without the sign

/// In place of random_word(), rounds to nearest, ties away from zero.
constexpr uint32_t kRoundNearest = 0x80008000u;

/// A weight of type W (f16 or bf16) and kBits (8 or 16) below it. Together they are the master: its
/// sign, and its magnitude as an integer whose upper bits are those of a W. The weight is the
/// master rounded to nearest, ties away from zero, and the remainder is signed: what the master is
/// above or below the weight.
template <typename W, int kBits>
struct SplitMaster {
  static_assert(kBits == 8 || kBits == 16);
  using Remainder = std::conditional_t<kBits == 8, int8_t, int16_t>;
  static constexpr bool kHalf = std::is_same_v<W, f16>;
  static constexpr uint32_t kBias = 0x38000000u;  // exponents of f16 and float differ by 112
  // Bits of a float below the last bit of the master; below 0: the master has more bits.
  static constexpr int kDropped = (kHalf ? 13 : 16) - kBits;
  static constexpr uint32_t kRandomMask = kDropped > 0 ? (1u << kDropped) - 1 : 0;
  // The integer of the smallest normal f16, and the value of 1 below it.
  static constexpr uint32_t kNormal = 1u << (10 + kBits);
  static constexpr float kUnit = kBits == 8 ? 0x1p-32f : 0x1p-40f;
  // From here on the master is inf: 65536 for f16.
  static constexpr uint32_t kInf = kHalf ? 0x47800000u : 0x7F800000u;

  W weight;
  Remainder remainder;

  /// NaN and what is beyond the range become inf. `random`: random_word(), or kRoundNearest.
  HEADROOM_HOST_DEVICE static SplitMaster split(float master, uint32_t random) {
    const uint32_t bits = float_bits(master);
    const uint32_t magnitude = (bits & kMagnitude) < kInf ? bits & kMagnitude : kInf;
    const uint32_t dither = (random >> (16 - (kDropped > 0 ? kDropped : 0))) & kRandomMask;
    uint32_t whole;
    if (!kHalf) {
      whole = (magnitude + dither) >> kDropped;
    } else if (magnitude >= 0x38800000u) {
      const uint32_t normal = magnitude - kBias;
      whole = kDropped > 0 ? (normal + dither) >> (kDropped & 31) : normal << (-kDropped & 31);
    } else {
      // Subnormal f16. With 16 bits the rest, below 2^-40, is cut off.
      const float scaled = bits_float(magnitude) * (1.0f / kUnit);
      whole = static_cast<uint32_t>(scaled + static_cast<float>(dither) * (1.0f / 32.0f));
    }
    const uint32_t rounded = (whole + (1u << (kBits - 1))) >> kBits;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    return {W::from_bits(static_cast<uint16_t>(sign | rounded)),
            static_cast<Remainder>(whole - (rounded << kBits))};
  }

  /// The master. A weight that others have written keeps its remainder: the result is within half a
  /// unit of that weight. A negative remainder of a weight of 0 counts as 0.
  HEADROOM_HOST_DEVICE float join() const {
    const uint32_t magnitude = weight.bits & 0x7FFFu;
    const int32_t below = magnitude == 0 && remainder < 0 ? 0 : remainder;
    const uint32_t whole = (magnitude << kBits) + static_cast<uint32_t>(below);
    const uint32_t sign = static_cast<uint32_t>(weight.bits & 0x8000u) << 16;
    if (!kHalf) return bits_float(sign | whole << kDropped);
    if (whole < kNormal) {
      return bits_float(sign | float_bits(static_cast<float>(static_cast<int32_t>(whole)) * kUnit));
    }
    const uint32_t normal =
        kDropped > 0 ? whole << (kDropped & 31) : whole >> (-kDropped & 31);
    return bits_float(sign | (normal + kBias));
  }
};

/// Elements that share an exponent in StateFormat::kByte.
constexpr int64_t kGroupSize = 32;

/// A moment in 8 bits: a small float with 3 bits of mantissa, kExponentBits of exponent, subnormal
/// numbers and no inf or NaN, whose exponents count from that of its group. The first moment has
/// a sign and 4 bits of exponent; the second one is never negative and has 5.
///
/// Because the exponent of a group is a power of two, a value that is stored again under another
/// exponent stays the same: rounding only adds noise when a value changes.
template <int kExponentBits>
struct MomentCode {
  static constexpr bool kSigned = kExponentBits == 4;
  static constexpr int kMantissaBits = 3;
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr uint32_t kFirstNormal = 1u << kMantissaBits;
  static constexpr uint32_t kBinades = (1u << kExponentBits) - 2;  // of normal numbers, less one
  static constexpr uint32_t kLowest = kBinades + 8;  // exponent; keeps all arithmetic normal
  // Larger magnitudes, inf and NaN are stored as the largest one: 2^127.
  static constexpr uint32_t kLargest = 0x7EFFFFFFu;

  HEADROOM_HOST_DEVICE static uint32_t magnitude(float value) {
    const uint32_t bits = float_bits(value) & kMagnitude;
    return bits < kLargest ? bits : kLargest;
  }

  /// The exponent of a group whose largest magnitude(), as bits, this is: it can be rounded up.
  HEADROOM_HOST_DEVICE static uint32_t exponent(uint32_t largest) {
    const uint32_t rounded = (largest + (1u << kDropped) - 1) >> 23;
    return rounded > kLowest ? rounded : kLowest;
  }

  /// `random`: 16 bits; 0x8000 rounds to nearest. A second moment that is not 0 is never rounded to
  /// 0, which would divide the next update by almost nothing.
  HEADROOM_HOST_DEVICE static uint8_t encode(float value, uint32_t exponent, uint32_t random) {
    const uint32_t smallest = (exponent - kBinades) << 23;  // normal number of the group
    const uint32_t bits = magnitude(value);
    const bool subnormal = bits < smallest;
    // The sum has the unit of subnormal numbers in the last bit that is kept.
    const uint32_t moved =
        subnormal ? float_bits(bits_float(bits) + bits_float(smallest)) : bits;
    const uint32_t kept = (moved + (random << (kDropped - 16))) >> kDropped;
    uint32_t code = kept - (smallest >> kDropped) + (subnormal ? 0 : kFirstNormal);
    if (kSigned) return static_cast<uint8_t>(code | (float_bits(value) >> 24 & 0x80u));
    return static_cast<uint8_t>(code == 0 && bits != 0 ? 1 : code);
  }

  HEADROOM_HOST_DEVICE static float decode(uint8_t code, uint32_t exponent) {
    const uint32_t smallest = (exponent - kBinades) << 23;
    const uint32_t magnitude = kSigned ? code & 0x7Fu : code;
    const bool subnormal = magnitude < kFirstNormal;
    const uint32_t bits = smallest + ((magnitude - (subnormal ? 0 : kFirstNormal)) << kDropped);
    const float value = bits_float(bits) - (subnormal ? bits_float(smallest) : 0.0f);
    return kSigned && (code & 0x80u) != 0 ? -value : value;
  }
};

using FirstMomentCode = MomentCode<4>;
using SecondMomentCode = MomentCode<5>;

/// A moment in 16 bits: bf16, rounded at random. `random`: 16 bits; 0x8000 rounds to nearest. Inf
/// and NaN are stored as the largest finite number.
HEADROOM_HOST_DEVICE inline bf16 encode_moment(float value, uint32_t random) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t kept = (magnitude < 0x7F7F0000u ? magnitude + random : 0x7F7F0000u) >> 16;
  return bf16::from_bits(static_cast<uint16_t>((bits >> 16 & 0x8000u) | kept));
}

/// Which half of random_word() rounds a moment.
HEADROOM_HOST_DEVICE constexpr uint32_t moment_random(uint32_t word, size_t buffer) {
  return buffer == 0 ? word & 0xFFFFu : word >> 16;
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_FORMATS_H_
