// What the measuring kernels do with a block that is out of the ordinary: it holds inf or NaN, or
// numbers whose squares would overflow or underflow. Plain code, one element at a time, the same on
// every SIMD target.
#ifndef HEADROOM_SRC_MEASURE_CAREFUL_H_
#define HEADROOM_SRC_MEASURE_CAREFUL_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "measure/stats.h"

namespace headroom::internal {

constexpr size_t kGroup = 32;    // elements that are added side by side
constexpr size_t kBlock = 1024;  // elements between two looks at the maximum

/// Bits: an integer of T's size. The magnitudes, as such integers, between which a block of T can
/// be squared and added without care: kTooSmall <= largest magnitude < kTooLarge.
template <typename T>
struct Careful;

template <>
struct Careful<f16> {
  using Bits = int16_t;
  static constexpr Bits kTooSmall = 0;
  static constexpr Bits kTooLarge = 0x7C00;  // inf
  static double from_bits(Bits bits) {
    return static_cast<float>(f16::from_bits(static_cast<uint16_t>(bits)));
  }
};

template <>
struct Careful<bf16> {
  using Bits = int16_t;
  static constexpr Bits kTooSmall = (127 - 50) << 7;  // 2^-50
  static constexpr Bits kTooLarge = (127 + 60) << 7;  // 2^60
  static double from_bits(Bits bits) {
    return static_cast<float>(bf16::from_bits(static_cast<uint16_t>(bits)));
  }
};

template <>
struct Careful<float> {
  using Bits = int32_t;
  static constexpr Bits kTooSmall = 0;
  static constexpr Bits kTooLarge = 0x7F800000;  // inf; squares of floats fit in doubles
  static double from_bits(Bits bits) { return std::bit_cast<float>(bits); }
};

template <>
struct Careful<double> {
  using Bits = int64_t;
  static constexpr Bits kTooSmall = int64_t{1023 - 450} << 52;  // 2^-450
  static constexpr Bits kTooLarge = int64_t{1023 + 450} << 52;  // 2^450
  static double from_bits(Bits bits) { return std::bit_cast<double>(bits); }
};

/// Exponent bits, not isfinite(), so that no compiler flag can optimise the question away.
inline bool finite_bits(f16 x) { return (x.bits & 0x7C00) != 0x7C00; }
inline bool finite_bits(bf16 x) { return (x.bits & 0x7F80) != 0x7F80; }
inline bool finite_bits(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7F800000u) != 0x7F800000u;
}
inline bool finite_bits(double x) {
  constexpr uint64_t kExponent = 0x7FF0000000000000u;
  return (std::bit_cast<uint64_t>(x) & kExponent) != kExponent;
}
inline bool is_inf(f16 x) { return (x.bits & 0x7FFF) == 0x7C00; }
inline bool is_inf(bf16 x) { return (x.bits & 0x7FFF) == 0x7F80; }
inline bool is_inf(float x) { return (std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu) == 0x7F800000u; }
inline bool is_inf(double x) {
  return (std::bit_cast<uint64_t>(x) & 0x7FFFFFFFFFFFFFFFu) == 0x7FF0000000000000u;
}

/// The element at `from`, which may have any alignment.
template <typename T>
T element(const T* from) {
  T x;
  std::memcpy(&x, from, sizeof(T));
  return x;
}

inline double widen(f16 x) { return static_cast<float>(x); }
inline double widen(bf16 x) { return static_cast<float>(x); }
inline double widen(float x) { return x; }
inline double widen(double x) { return x; }

/// Copies a block with zeros for its non-finite elements, which are counted for `tensor`.
template <typename T>
void careful_copy(const T* from, size_t count, int64_t tensor, T* to, GradStats* stats) {
  int64_t inf = 0;
  int64_t nan = 0;
  for (size_t i = 0; i < count; ++i) {
    const T x = element(from + i);
    const bool finite = finite_bits(x);
    inf += is_inf(x);
    nan += !finite && !is_inf(x);
    to[i] = finite ? x : T{};
  }
  add_bad(tensor, inf, nan, stats);
}

/// Adds the squares of a block of finite elements that are very large or very small.
template <typename T>
void careful_squares(const T* p, size_t count, GradStats* stats) {
  double amax = 0.0;
  for (size_t i = 0; i < count; ++i) amax = std::fmax(amax, std::fabs(widen(p[i])));
  const int which = amax >= 0x1p450 ? 2 : amax < 0x1p-450 ? 0 : 1;
  const double factor = std::ldexp(1.0, 600 * (1 - which));
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) {
    const double x = widen(p[i]) * factor;
    sum += x * x;
  }
  stats->amax = std::fmax(stats->amax, amax);
  stats->squares[which] += sum;
}

/// Counts zeros and subnormals, and the elements of each power of two.
template <typename T>
void add_detail(const T* p, size_t count, GradDetail* detail);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_CAREFUL_H_
