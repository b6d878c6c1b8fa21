// The slow reference of magnitude counting: rounds each number to a format and classifies the
// result.
#ifndef HEADROOM_TESTS_INSPECT_REFERENCE_H_
#define HEADROOM_TESTS_INSPECT_REFERENCE_H_

#include <headroom/inspect.h>

#include <string>
#include <vector>

#include "tests/support.h"

namespace headroom {

const std::vector<Format> kFormats = {Format::kFP16, Format::kBF16, Format::kE5M2, Format::kE4M3};

// 128 bits.
#ifdef __aarch64__
using Quad = long double;
#else
using Quad = __float128;
#endif

/// x * scale, rounded to odd at 24 bits. Rounding that float to a narrower format gives the same
/// result as rounding the exact product. (Quad holds products of a double and a float
/// exactly.)
inline float multiply_round_to_odd(double x, double scale) {
  const Quad exact = static_cast<Quad>(x) * static_cast<Quad>(scale);
  float near = static_cast<float>(exact);
  if (std::isinf(near)) return std::numeric_limits<float>::max();
  if (static_cast<Quad>(near) == exact) return near;
  // Round to odd: truncate towards zero, then set the last bit.
  uint32_t bits = std::bit_cast<uint32_t>(near);
  const Quad size = exact < 0 ? -exact : exact;
  if (static_cast<Quad>(std::fabs(near)) > size) --bits;
  return std::bit_cast<float>(bits | 1u);
}

/// Rounds to nearest even with `mantissa` stored bits and a smallest normal exponent. Divides by
/// the unit in the last place and calls rint, so it shares no bit manipulation with the library.
inline double round_to(double x, int mantissa, int min_exponent) {
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 1, min_exponent) - mantissa);
  return std::rint(x / unit) * unit;
}

enum class Fate { kKept, kFlushed, kSubnormal, kOverflow };

inline Fate classify(double x, Format format, double scale) {
  const float product = std::fabs(multiply_round_to_odd(x, scale));
  switch (format) {
    case Format::kFP16: {
      const uint16_t bits = f16(product).bits;
      return bits == 0        ? Fate::kFlushed
             : bits < 0x0400  ? Fate::kSubnormal
             : bits >= 0x7C00 ? Fate::kOverflow
                              : Fate::kKept;
    }
    case Format::kBF16: {
      const uint16_t bits = bf16(product).bits;
      return bits == 0        ? Fate::kFlushed
             : bits < 0x0080  ? Fate::kSubnormal
             : bits >= 0x7F80 ? Fate::kOverflow
                              : Fate::kKept;
    }
    case Format::kE5M2:
    case Format::kE4M3: {
      const bool e5m2 = format == Format::kE5M2;
      const double rounded = e5m2 ? round_to(product, 2, -14) : round_to(product, 3, -6);
      return rounded == 0.0                        ? Fate::kFlushed
             : rounded < (e5m2 ? 0x1p-14 : 0x1p-6) ? Fate::kSubnormal
             : rounded > (e5m2 ? 57344.0 : 448.0)  ? Fate::kOverflow
                                                   : Fate::kKept;
    }
  }
  return Fate::kKept;
}

template <typename T>
Outcome count_by_conversion(const std::vector<T>& values, Format format, double scale) {
  Outcome outcome;
  for (const T value : values) {
    const double x = static_cast<double>(to_double(value));
    if (!std::isfinite(x) || x == 0.0) continue;
    const Fate fate = classify(x, format, scale);
    outcome.flushed += fate == Fate::kFlushed;
    outcome.subnormal += fate == Fate::kSubnormal;
    outcome.overflow += fate == Fate::kOverflow;
  }
  return outcome;
}

inline std::string to_text(const Outcome& outcome) {
  return std::to_string(outcome.flushed) + " flushed, " + std::to_string(outcome.subnormal) +
         " subnormal, " + std::to_string(outcome.overflow) + " overflow";
}

}  // namespace headroom

#endif  // HEADROOM_TESTS_INSPECT_REFERENCE_H_
