// Compact formats of masters and moments (StateFormat), as scalar functions: the reference for the
// SIMD kernels and the code of CUDA kernels. docs/state.md describes the formats.
//
// What a format cannot hold is rounded at random, up or down with the right mean, by adding random
// bits ("dither") below the last bit that is kept. Rounding to nearest would lose every change
// smaller than half a unit: a second moment with beta2 = 0.999 changes by 0.1 % in a step, far less
// than a unit of 8 or 16 bits, and would never decay.
#ifndef HEADROOM_SRC_APPLY_FORMATS_H_
#define HEADROOM_SRC_APPLY_FORMATS_H_

#include <headroom/float16.h>

#include <cstdint>
#include <type_traits>

#include "apply/rules.h"

namespace headroom::internal {

constexpr uint32_t kMagnitude = 0x7FFFFFFFu;  // the bits of a float without the sign

/// Larger of two numbers as signed integers. Bits of floats without sign are ordered like this.
HEADROOM_HOST_DEVICE inline uint32_t larger(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
}
HEADROOM_HOST_DEVICE inline uint32_t smaller(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b;
}

/// Random bits of an element. Eight elements share one hash, of which each takes the product with
/// an odd number: a permutation of all words, so that the bits of every element are uniform.
HEADROOM_HOST_DEVICE constexpr uint32_t dither_factor(uint32_t i) {
  constexpr uint32_t kFactors[8] = {0x9E3779B1u, 0x85EBCA6Bu, 0xC2B2AE35u, 0x27D4EB2Fu,
                                    0x165667B1u, 0xD3A2646Du, 0xFD7046C5u, 0xB55A4F09u};
  return kFactors[i];
}
HEADROOM_HOST_DEVICE inline uint32_t dither_hash(uint32_t index, uint32_t key) {
  return random_word(index / 8, key);
}
inline uint32_t dither_word(uint32_t index, uint32_t key) {
  return dither_hash(index, key) * dither_factor(index % 8);
}

/// A dither of kBits bits from a dither_word(). Master and moments use the same bits, so their
/// rounding errors are correlated. That is harmless: an update by moments in 8 bits is larger by 2
/// parts in 10,000 on average, and with independent bits by 5.
template <int kBits>
HEADROOM_HOST_DEVICE constexpr uint32_t dither_of(uint32_t word) {
  return kBits == 0 ? 0 : word >> (32 - kBits) % 32;
}

/// Bits that are cut off a moment in 8 and in 16 bits, and the dither of kMomentBits bits that
/// rounds to nearest, ties away from zero.
constexpr int kMomentBits = 20, kHalfMomentBits = 16;
constexpr uint32_t kNearestMoment = 0x80000u;

/// Numbers without sign with exponents from that of kMin = 2^-14 on, and subnormal ones below: f16
/// with more or fewer bits. kDropped: bits of a float's mantissa that are cut off.
template <int kDropped>
struct HalfRange {
  static constexpr uint32_t kMinBits = 0x38800000u;  // of 2^-14
  static constexpr uint32_t kBinade = 1u << 23;

  /// `value` is 0 or more; `dither` has kDropped bits. A value below kMin is added to kMin, which
  /// aligns it as a subnormal number; a larger one keeps its bits, one binade up. Of the two
  /// results the larger one is right in either case.
  HEADROOM_HOST_DEVICE static uint32_t encode(float value, uint32_t dither) {
    return place(value, dither) >> kDropped;
  }

  /// encode() before the shift: the lower kDropped bits are not part of the code.
  HEADROOM_HOST_DEVICE static uint32_t place(float value, uint32_t dither) {
    const uint32_t subnormal = float_bits(value + bits_float(kMinBits));
    const uint32_t bits = larger(subnormal, float_bits(value) + kBinade);
    return bits - kMinBits + dither;
  }

  /// The inverse of encode() and place(). Of the two results the smaller one is right.
  HEADROOM_HOST_DEVICE static float decode(uint32_t code) { return unplace(code << kDropped); }
  HEADROOM_HOST_DEVICE static float unplace(uint32_t placed) {
    const uint32_t bits = placed + kMinBits;
    const float subnormal = bits_float(bits) - bits_float(kMinBits);
    return bits_float(smaller(float_bits(subnormal), bits - kBinade));
  }
};

/// A weight of type W (f16 or bf16) and kBits (8 or 16) below it. Together they are the master: its
/// sign, and its magnitude as an integer whose upper 16 bits are those of a W. The weight is the
/// master rounded to nearest, ties away from zero, and the remainder is signed: what the master is
/// above or below the weight. So the remainder is the lower part of that integer.
template <typename W, int kBits>
struct SplitMaster {
  static_assert(kBits == 8 || kBits == 16);
  using Remainder = std::conditional_t<kBits == 8, uint8_t, uint16_t>;
  static constexpr bool kHalf = std::is_same_v<W, f16>;
  /// Bits of a float below the last bit of the master. An f16 with 16 bits below has 3 bits more.
  static constexpr int kDropped = kHalf ? (kBits == 8 ? 5 : 0) : 16 - kBits;
  static constexpr uint32_t kHalfUnit = 0x8000u;      // of the weight
  static constexpr float kHalfInf = 65536.0f;         // inf in f16, and what NaN becomes
  static constexpr uint32_t kQuietNan = 0x7FC00000u;  // what NaN becomes in bf16

  W weight;
  Remainder remainder;

  /// `dither`: dither_of<kDropped>(), or 0 with kBits = 16, where nothing is rounded but f16
  /// below 2^-14, at 2^-40.
  HEADROOM_HOST_DEVICE static SplitMaster split(float master, uint32_t dither) {
    const uint32_t bits = aligned(master, dither);
    const uint32_t sign = kHalf ? float_bits(master) >> 16 & 0x8000u : 0;
    return {W::from_bits(static_cast<uint16_t>(sign | (bits + kHalfUnit) >> 16)),
            static_cast<Remainder>(bits >> (16 - kBits))};
  }

  /// The integer of a master: 16 bits of the weight, kBits of the remainder, and lower bits that
  /// are not part of either. With bf16 the uppermost bit is the sign.
  HEADROOM_HOST_DEVICE static uint32_t aligned(float master, uint32_t dither) {
    if constexpr (!kHalf) {
      return (master == master ? float_bits(master) : kQuietNan) + dither;
    } else {
      const float magnitude =
          bits_float(smaller(float_bits(master) & kMagnitude, float_bits(kHalfInf)));
      return aligned_half(magnitude, dither);
    }
  }

  /// The same for f16, of a magnitude up to kHalfInf.
  HEADROOM_HOST_DEVICE static uint32_t aligned_half(float magnitude, uint32_t dither) {
    if constexpr (kBits == 8) {
      return HalfRange<kDropped>::place(magnitude, dither) * 8;
    } else {
      if (magnitude < 0x1p-14f) return static_cast<uint32_t>(magnitude * 0x1p40f);
      return (float_bits(magnitude) - 0x38000000u) << 3;
    }
  }

  /// The master. A weight that others have written keeps its remainder: the result is within half a
  /// unit of that weight. A negative remainder of a weight of 0 counts as 0.
  HEADROOM_HOST_DEVICE float join() const {
    // The remainder with its sign in the bits above it, at its place.
    const uint32_t at_top = static_cast<uint32_t>(remainder) << (32 - kBits);
    const auto below = static_cast<uint32_t>(static_cast<int32_t>(at_top) >> 16);
    return join(static_cast<uint32_t>(weight.bits) << 16, below);
  }

  /// The same from the bits of the weight and of the remainder at their places in the integer.
  HEADROOM_HOST_DEVICE static float join(uint32_t weight, uint32_t below) {
    const uint32_t whole = larger((weight & kMagnitude) + below, 0);
    return bits_float((weight & ~kMagnitude) | float_bits(value(whole)));
  }

 private:
  HEADROOM_HOST_DEVICE static float value(uint32_t whole) {
    if constexpr (!kHalf) {
      return bits_float(whole);
    } else if constexpr (kBits == 8) {
      return HalfRange<kDropped>::unplace(whole >> 3);
    } else {
      if (whole < (1u << 26)) return static_cast<float>(static_cast<int32_t>(whole)) * 0x1p-40f;
      return bits_float((whole >> 3) + 0x38000000u);
    }
  }
};

/// Elements that share an exponent in StateFormat::kByte.
constexpr int64_t kGroupSize = 32;

/// Larger moments, inf and NaN are stored as the largest one: 2^126.
constexpr uint32_t kLargestMoment = 0x7E800000u;

/// The bits of a moment without the sign, limited to kLargestMoment. Second moments have no sign.
HEADROOM_HOST_DEVICE inline uint32_t moment_magnitude(float value) {
  return smaller(float_bits(value) & kMagnitude, kLargestMoment);
}

/// The first moment in 8 bits: sign, 4 bits of exponent, 3 of mantissa, with subnormal numbers and
/// without inf and NaN. Exponents count from that of the group.
///
/// Because the exponent of a group stands for a power of two, a value that is stored again under
/// another exponent stays the same: rounding only adds noise when a value changes.
struct FirstMoment {
  static constexpr uint32_t kLowest = 18;  // exponent of a group; keeps all arithmetic normal
  using Range = HalfRange<20>;

  /// The exponent of a group from the largest moment_magnitude(): it can be rounded up.
  HEADROOM_HOST_DEVICE static uint32_t exponent(uint32_t largest) {
    return larger((largest + 0xFFFFFu) >> 23, kLowest);
  }

  HEADROOM_HOST_DEVICE static uint8_t encode(float value, uint32_t exponent, uint32_t dither) {
    const float magnitude = bits_float(moment_magnitude(value));
    const uint32_t code = Range::encode(magnitude * bits_float((254 - exponent) << 23), dither);
    return static_cast<uint8_t>(code | (float_bits(value) >> 24 & 0x80u));
  }

  HEADROOM_HOST_DEVICE static float decode(uint8_t code, uint32_t exponent) {
    const float magnitude = Range::decode(code & 0x7Fu) * bits_float(exponent << 23);
    return bits_float(float_bits(magnitude) | static_cast<uint32_t>(code & 0x80u) << 24);
  }
};

/// The second moment in 8 bits: 5 bits of exponent and 3 of mantissa, without sign and zero, except
/// that a group of exponent 0 is all zeros. In other groups the smallest number, 2^-31 of the
/// largest power of two, stands for all below: a second moment that came out as 0 would divide the
/// update by almost nothing.
struct SecondMoment {
  static constexpr uint32_t kLowest = 32;

  HEADROOM_HOST_DEVICE static uint32_t exponent(uint32_t largest) {
    return largest == 0 ? 0 : larger((largest + 0xFFFFFu) >> 23, kLowest);
  }

  /// The bits of code 0 in a group.
  HEADROOM_HOST_DEVICE static uint32_t first_bits(uint32_t exponent) {
    return exponent == 0 ? 0 : (exponent - 31) << 23;
  }

  HEADROOM_HOST_DEVICE static uint8_t encode(float value, uint32_t exponent, uint32_t dither) {
    return static_cast<uint8_t>(place(value, exponent, dither) >> 20);
  }

  /// encode() before the shift: the lower 20 bits are not part of the code.
  HEADROOM_HOST_DEVICE static uint32_t place(float value, uint32_t exponent, uint32_t dither) {
    return larger(moment_magnitude(value) + dither - first_bits(exponent), 0);
  }

  HEADROOM_HOST_DEVICE static float decode(uint8_t code, uint32_t exponent) {
    return bits_float(first_bits(exponent) + (static_cast<uint32_t>(code) << 20));
  }
};

/// A moment in 16 bits: bf16. `dither`: kHalfMomentBits; 0x8000 rounds to nearest. Inf and NaN are
/// stored as the largest finite number.
HEADROOM_HOST_DEVICE inline bf16 encode_moment(float value, uint32_t dither) {
  constexpr uint32_t kLargest = 0x7F7F0000u;
  const uint32_t bits = float_bits(value);
  const uint32_t kept = smaller(smaller(bits & kMagnitude, kLargest) + dither, kLargest) >> 16;
  return bf16::from_bits(static_cast<uint16_t>((bits >> 16 & 0x8000u) | kept));
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_FORMATS_H_
