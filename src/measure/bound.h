// unscale_() without its checks, for views that were checked when they were bound to
// an optimizer: a step does not repeat the queries of CUDA's driver.
#ifndef HEADROOM_SRC_MEASURE_BOUND_H_
#define HEADROOM_SRC_MEASURE_BOUND_H_

#include <headroom/measure.h>

#include <vector>

namespace headroom::internal {

/// An inverse scale of 1 measures only.
GradStats unscale_bound(const std::vector<TensorView>& grads, float inverse_scale);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_BOUND_H_
