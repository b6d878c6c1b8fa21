// The arithmetic of GradStats. The same source runs on the host and in CUDA kernels.
#ifndef HEADROOM_SRC_MEASURE_STATS_H_
#define HEADROOM_SRC_MEASURE_STATS_H_

#include <headroom/measure.h>

#include <cmath>
#include <type_traits>

#include "core/element.h"

namespace headroom::internal {

// The same bytes on the host, on devices and in reports.
static_assert(std::is_trivially_copyable_v<GradStats>);

/// If the largest magnitude of a block, as bits, is zero or in [kTooSmall, kTooLarge), the squares
/// of the block can be added without care: none overflows, and what underflows is far below the
/// rounding error of the sum. Squares of f16 fit into FP32, squares of FP32 into double; bf16 and
/// f64 have the range of their sums' type and need the margin.
template <typename T>
struct SquareLimits {
  static constexpr typename Element<T>::Bits kTooSmall = 1, kTooLarge = Element<T>::kInf;
};
template <>
struct SquareLimits<bf16> {  // 2^-50 and 2^60
  static constexpr uint16_t kTooSmall = (127 - 50) << 7, kTooLarge = (127 + 60) << 7;
};
template <>
struct SquareLimits<double> {  // 2^-450 and 2^450
  static constexpr uint64_t kTooSmall = uint64_t{1023 - 450} << 52;
  static constexpr uint64_t kTooLarge = uint64_t{1023 + 450} << 52;
};

/// Adds `part` to `whole`. The culprit is the bad tensor that comes first in the list, regardless
/// of the order in which parts are merged.
HEADROOM_HOST_DEVICE inline void merge(const GradStats& part, GradStats* whole) {
  whole->count += part.count;
  whole->inf_count += part.inf_count;
  whole->nan_count += part.nan_count;
  whole->amax = whole->amax > part.amax ? whole->amax : part.amax;
  for (int i = 0; i < 3; ++i) whole->squares[i] += part.squares[i];
  whole->new_inf += part.new_inf;
  whole->new_zeros += part.new_zeros;
  if (part.culprit < 0) return;
  if (whole->culprit < 0 || part.culprit < whole->culprit) {
    whole->culprit = part.culprit;
    whole->culprit_inf = 0;
    whole->culprit_nan = 0;
  }
  if (part.culprit == whole->culprit) {
    whole->culprit_inf += part.culprit_inf;
    whole->culprit_nan += part.culprit_nan;
  }
}

/// Adds what was found in copies of gradients that are counted elsewhere: all but the norm.
HEADROOM_HOST_DEVICE inline void merge_copies(GradStats copies, GradStats* whole) {
  copies.count = 0;
  for (double& square : copies.squares) square = 0.0;
  merge(copies, whole);
}

/// Adds the numbers of inf and NaN elements of `tensor`. Tensors have to be added in the order of
/// the list.
HEADROOM_HOST_DEVICE inline void add_bad(int64_t tensor, int64_t inf, int64_t nan,
                                         GradStats* stats) {
  if (inf + nan == 0) return;
  stats->inf_count += inf;
  stats->nan_count += nan;
  if (stats->culprit < 0) stats->culprit = tensor;
  if (stats->culprit == tensor) {
    stats->culprit_inf += inf;
    stats->culprit_nan += nan;
  }
}

/// Copies the culprit, which an earlier pass over the same gradients has found.
HEADROOM_HOST_DEVICE inline void copy_culprit(const GradStats& from, GradStats* to) {
  to->culprit = from.culprit;
  to->culprit_inf = from.culprit_inf;
  to->culprit_nan = from.culprit_nan;
  to->culprit_rank = from.culprit_rank;
}

/// L2 norm of the finite elements. The sums of squares have different units (see
/// GradStats::squares): each is converted to the unit of the next larger one. What underflows there
/// is far below the rounding error.
HEADROOM_HOST_DEVICE inline double finite_norm(const GradStats& stats) {
  const double* const squares = stats.squares;
  if (squares[2] > 0.0) {
    return std::ldexp(std::sqrt(squares[2] + std::ldexp(squares[1], -1200)), 600);
  }
  if (squares[1] > 0.0) return std::sqrt(squares[1] + std::ldexp(squares[0], -1200));
  return std::ldexp(std::sqrt(squares[0]), -600);
}

/// GradStats::norm().
HEADROOM_HOST_DEVICE inline double norm_of(const GradStats& stats) {
  if (stats.nan_count > 0) return NAN;
  if (stats.inf_count > 0) return HUGE_VAL;
  return finite_norm(stats);
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_STATS_H_
