// The scalar path of the measuring kernels, for blocks with inf, NaN, or numbers whose squares
// would overflow or underflow. It handles one element at a time and is the same on every SIMD
// target.
#ifndef HEADROOM_SRC_MEASURE_SCALAR_H_
#define HEADROOM_SRC_MEASURE_SCALAR_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/element.h"
#include "measure/stats.h"

namespace headroom::internal {

constexpr size_t kGroup = 32;    // elements that are added side by side, in 32 lanes
constexpr size_t kBlock = 1024;  // elements between two checks of the largest magnitude

/// The element at `from`, which may have any alignment.
template <typename T>
T element(const T* from) {
  T x;
  std::memcpy(&x, from, sizeof(T));
  return x;
}

template <typename T>
double widen(T x) {
  return static_cast<float>(x);
}
inline double widen(double x) { return x; }

/// Copies a block, replaces inf and NaN by zero, and counts them for `tensor`.
template <typename T>
void copy_finite(const T* from, size_t count, int64_t tensor, T* to, GradStats* stats) {
  int64_t inf = 0;
  int64_t nan = 0;
  for (size_t i = 0; i < count; ++i) {
    const T x = element(from + i);
    const auto magnitude = magnitude_of(x);
    inf += magnitude == Element<T>::kInf;
    nan += magnitude > Element<T>::kInf;
    to[i] = magnitude < Element<T>::kInf ? x : T{};
  }
  add_bad(tensor, inf, nan, stats);
}

/// Adds the squares of a block of finite elements, scaled so that the largest one neither overflows
/// nor underflows: see GradStats::squares.
template <typename T>
void add_scaled_squares(const T* p, size_t count, GradStats* stats) {
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

/// Counts zeros, subnormals, and the finite elements of each power of two (detail.cc).
template <typename T>
void add_detail(const T* p, size_t count, GradDetail* detail);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_SCALAR_H_
