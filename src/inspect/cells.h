// inspect/ predicts how gradients fare in a format at a given scale. It must not know about files.
// This header divides the positive numbers into cells. In every format and at every power of two
// all numbers of a cell have the same outcome: flushed, subnormal, normal or overflow.
//
// Multiplying by a power of two changes the octave of a number and not its mantissa. It is
// therefore sufficient to divide each octave [2^e, 2^(e+1)) where the range of some format ends
// (see limits()):
//
//   class 0   1 exactly        the last number that is flushed, in all formats
//   class 2   from 1.75        E5M2: rounds up to the smallest normal number
//   class 3   beyond 1.8125    E4M3: overflow
//   class 4   from 2 - 2^-3    E5M2: overflow;  E4M3: smallest normal number
//   class 5   from 2 - 2^-7    BF16: smallest normal number
//   class 6   from 2 - 2^-8    BF16: overflow
//   class 7   from 2 - 2^-10   FP16: smallest normal number
//   class 8   from 2 - 2^-11   FP16: overflow
#ifndef HEADROOM_SRC_INSPECT_CELLS_H_
#define HEADROOM_SRC_INSPECT_CELLS_H_

#include <headroom/tensor.h>

#include <bit>
#include <cstdint>

namespace headroom::internal {

/// The class of a mantissa of `kBits` bits, without the leading one. Plain sums of comparisons,
/// which compilers turn into vector code.
template <int kBits, typename Mantissa>
inline Mantissa mantissa_class(Mantissa m) {
  constexpr auto cut = [](int numerator, int log2_denominator) {
    return static_cast<Mantissa>(static_cast<Mantissa>(numerator) << (kBits - log2_denominator));
  };
  return static_cast<Mantissa>((m > 0) + (m >= cut(3, 2)) + (m > cut(13, 4)) + (m >= cut(7, 3)) +
                               (m >= cut(127, 7)) + (m >= cut(255, 8)) + (m >= cut(1023, 10)) +
                               (m >= cut(2047, 11)));
}

/// Classes of one octave have consecutive keys, and a larger number never has a smaller key. Beyond
/// these octaves the outcome is the same in every format at every scale.
constexpr int kClasses = 16;
constexpr int kMaxOctave = 400;

inline int32_t cell_key(int octave, int mantissa_class) {
  if (octave > kMaxOctave) return kMaxOctave * kClasses;
  if (octave < -kMaxOctave) return -kMaxOctave * kClasses;
  return octave * kClasses + mantissa_class;
}

/// The cell of a finite double above zero.
inline int32_t cell_of(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  const auto octave = static_cast<int>(bits >> 52) - 1023;
  const auto mantissa = static_cast<int64_t>(bits & 0xFFFFFFFFFFFFFu);
  return cell_key(octave, static_cast<int>(mantissa_class<52>(mantissa)));
}

/// The cell of a finite float above zero, from its bits: right whatever the floating-point mode.
inline int32_t cell_of_float_bits(uint32_t bits) {
  auto octave = static_cast<int>(bits >> 23) - 127;
  auto mantissa = static_cast<int32_t>(bits & 0x7FFFFFu);
  if (octave == -127) {  // subnormal
    const int width = std::bit_width(static_cast<uint32_t>(mantissa));
    octave = width - 150;
    mantissa = (mantissa << (24 - width)) & 0x7FFFFF;
  }
  return cell_key(octave, mantissa_class<23>(mantissa));
}

/// The number of this type whose sign is plus and whose other bits are these.
inline double magnitude_value(DType dtype, uint64_t bits) {
  if (dtype == DType::kF64) return std::bit_cast<double>(bits);
  if (dtype == DType::kF32) return bits_float(static_cast<uint32_t>(bits));
  if (dtype == DType::kF16) return half_bits_to_float(static_cast<uint16_t>(bits));
  return bfloat_bits_to_float(static_cast<uint16_t>(bits));
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_INSPECT_CELLS_H_
