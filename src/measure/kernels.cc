#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "measure/kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "core/simd.h"
#include "measure/kernels-inl.h"

#if HWY_ONCE
namespace headroom::internal {

HWY_EXPORT(measure_kernels_for_target);

const MeasureKernels& measure_kernels() { return *HEADROOM_DISPATCH(measure_kernels_for_target)(); }

}  // namespace headroom::internal
#endif
