// The arithmetic of GradStats, on the host and on CUDA devices.
#ifndef HEADROOM_SRC_MEASURE_STATS_H_
#define HEADROOM_SRC_MEASURE_STATS_H_

#include <headroom/measure.h>

#include <cmath>

namespace headroom::internal {

/// Adds `part` to `whole`. The culprit is the tensor that comes first in the list, in whatever
/// order the parts are merged.
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

/// Counts elements of `tensor` that are inf or nan.
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

/// Names the culprit that was found earlier.
HEADROOM_HOST_DEVICE inline void copy_culprit(const GradStats& from, GradStats* to) {
  to->culprit = from.culprit;
  to->culprit_inf = from.culprit_inf;
  to->culprit_nan = from.culprit_nan;
  to->culprit_rank = from.culprit_rank;
}

/// L2 norm of the finite elements. Each sum is converted to the unit of the next larger one; what
/// underflows there is far below rounding.
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
