// measure/ reads gradients once and produces GradStats. It must not know about optimizers or
// policies. This header separates the bookkeeping of tensor lists (measure.cc) from the kernels
// (kernels-inl.h), which exist once per SIMD target.
#ifndef HEADROOM_SRC_MEASURE_KERNELS_H_
#define HEADROOM_SRC_MEASURE_KERNELS_H_

#include <headroom/measure.h>

#include <cstddef>
#include <cstdint>

namespace headroom::internal {

/// Consecutive elements of a list of tensors of one type: from element `first_begin` of tensor
/// `first` up to, but not including, element `last_end` of tensor `last`.
struct Range {
  size_t first;
  int64_t first_begin;
  size_t last;
  int64_t last_end;

  int64_t begin_in(size_t tensor) const { return tensor == first ? first_begin : 0; }
  int64_t end_in(size_t tensor, const TensorView* list) const {
    return tensor == last ? last_end : list[tensor].count;
  }
};

/// Elements that one thread reads before it takes more work.
inline constexpr int64_t kRangeElements = int64_t{1} << 16;

/// What to do besides measuring.
struct MeasureJob {
  bool unscale = false;                  // multiply every element in place
  float inverse_scale = 1.0f;            // by this,
  const float* device_factor = nullptr;  // or by this number on the CUDA device, if not null
  bool skip_at_one = false;  // CUDA: if the factor is 1, neither read nor write (no statistics)
};

/// Adds its results for the range to `stats` and, if that is not null, to `detail`.
using MeasureFunction = void (*)(const TensorView* list, const Range& range, const MeasureJob& job,
                                 GradStats* stats, GradDetail* detail);

/// The kernel for one element type on the SIMD target in use.
MeasureFunction measure_function(DType dtype);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_KERNELS_H_
