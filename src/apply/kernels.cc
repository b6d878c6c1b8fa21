#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "apply/kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "apply/kernels-inl.h"
#include "core/simd.h"

#if HWY_ONCE
namespace headroom::internal {

HWY_EXPORT(apply_kernels_for_target);

const ApplyKernels& apply_kernels() { return *HEADROOM_DISPATCH(apply_kernels_for_target)(); }

}  // namespace headroom::internal
#endif
