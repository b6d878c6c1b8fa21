// measure/ reads gradients once and says what is in them; it knows nothing of optimizers or
// policies. This header is the line between the list of tensors (measure.cc) and the kernels, one
// table of which exists per SIMD target.
#ifndef HEADROOM_SRC_MEASURE_KERNELS_H_
#define HEADROOM_SRC_MEASURE_KERNELS_H_

#include <headroom/measure.h>

#include <cstddef>
#include <cstdint>

namespace headroom::internal {

/// A run of elements through a list of tensors of one type: from element `first_begin` of tensor
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

struct MeasureJob {
  bool unscale = false;        // after reading, multiply in place by
  float inverse_scale = 1.0f;  // this
};

/// Adds what it finds in its range to `stats` and, if that is not null, to `detail`.
using MeasureFunction = void (*)(const TensorView* list, const Range& range, const MeasureJob& job,
                                 GradStats* stats, GradDetail* detail);

/// The kernels of one SIMD target, one per DType.
struct MeasureKernels {
  MeasureFunction by_dtype[4];
};

/// The kernels of the SIMD target in use.
const MeasureKernels& measure_kernels();

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_KERNELS_H_
