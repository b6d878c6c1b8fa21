// Compiles kernels-inl.h once per SIMD target and selects a kernel at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "measure/kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "core/simd.h"
#include "measure/kernels-inl.h"

#if HWY_ONCE
namespace headroom::internal {

HWY_EXPORT(measure_function_for_target);

MeasureFunction measure_function(DType dtype) {
  return HEADROOM_DISPATCH(measure_function_for_target)(dtype);
}

}  // namespace headroom::internal
#endif
