// inspect/: counts what a 16-bit or 8-bit format does to gradients at a scale, and recommends a
// static scale. It must not know about files, optimizers or policies.
//
// This header divides the positive numbers into cells such that all numbers of a cell have the same
// outcome (flushed, subnormal, normal, overflow) in every format at every power of two.
//
// Multiplying by a power of two shifts a number by whole octaves and leaves its mantissa unchanged.
// So it is enough to divide each octave [2^e, 2^(e+1)) at the mantissas at which some format's
// range ends (see limits()):
//
//   class 0   1 exactly        all formats: the largest number that is flushed
//   class 2   from 1.75        E5M2: rounds up to the smallest normal number
//   class 3   above 1.8125     E4M3: overflow
//   class 4   from 2 - 2^-3    E5M2: overflow;  E4M3: smallest normal number
//   class 5   from 2 - 2^-7    BF16: smallest normal number
//   class 6   from 2 - 2^-8    BF16: overflow
//   class 7   from 2 - 2^-10   FP16: smallest normal number
//   class 8   from 2 - 2^-11   FP16: overflow
//
// Class 1 is the rest of the octave, between 1 and 1.75.
#ifndef HEADROOM_SRC_INSPECT_CELLS_H_
#define HEADROOM_SRC_INSPECT_CELLS_H_

#include <headroom/tensor.h>

#include <bit>
#include <cstdint>

namespace headroom::internal {

/// The class of a mantissa of `kBits` bits, without the leading one. A sum of comparisons instead
/// of branches, so that compilers vectorise it.
template <int kBits, typename Mantissa>
inline Mantissa mantissa_class(Mantissa m) {
  constexpr auto cut = [](int numerator, int log2_denominator) {
    return static_cast<Mantissa>(static_cast<Mantissa>(numerator) << (kBits - log2_denominator));
  };
  return static_cast<Mantissa>((m > 0) + (m >= cut(3, 2)) + (m > cut(13, 4)) + (m >= cut(7, 3)) +
                               (m >= cut(127, 7)) + (m >= cut(255, 8)) + (m >= cut(1023, 10)) +
                               (m >= cut(2047, 11)));
}

/// A cell's key is octave * kClasses + class, so larger numbers never have smaller keys. Octaves
/// beyond +-kMaxOctave share one key: no format and no scale distinguishes them.
constexpr int kClasses = 16;
constexpr int kMaxOctave = 400;

inline int32_t cell_key(int octave, int mantissa_class) {
  if (octave > kMaxOctave) return kMaxOctave * kClasses;
  if (octave < -kMaxOctave) return -kMaxOctave * kClasses;
  return octave * kClasses + mantissa_class;
}

/// The cell of a finite, normal double above zero.
inline int32_t cell_of(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  const auto octave = static_cast<int>(bits >> 52) - 1023;
  const auto mantissa = static_cast<int64_t>(bits & 0xFFFFFFFFFFFFFu);
  return cell_key(octave, static_cast<int>(mantissa_class<52>(mantissa)));
}

/// The bit layout of a floating-point type.
struct Layout {
  int mantissa_bits;
  int exponent_bits;

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr uint64_t inf() const { return ((uint64_t{1} << exponent_bits) - 1) << mantissa_bits; }
};

constexpr Layout layout_of(DType dtype) {
  constexpr Layout kLayouts[] = {{10, 5}, {7, 8}, {23, 8}, {52, 11}};
  return kLayouts[static_cast<size_t>(dtype)];
}

/// The positive number of this type with these bits.
inline double magnitude_value(DType dtype, uint64_t bits) {
  if (dtype == DType::kF64) return std::bit_cast<double>(bits);
  if (dtype == DType::kF32) return bits_float(static_cast<uint32_t>(bits));
  if (dtype == DType::kF16) return half_bits_to_float(static_cast<uint16_t>(bits));
  return bfloat_bits_to_float(static_cast<uint16_t>(bits));
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_INSPECT_CELLS_H_
