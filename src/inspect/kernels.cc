#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "inspect/kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "core/simd.h"
#include "inspect/kernels-inl.h"

#if HWY_ONCE
namespace headroom::internal {

HWY_EXPORT(inspect_kernels_for_target);

const InspectKernels& inspect_kernels() { return *HEADROOM_DISPATCH(inspect_kernels_for_target)(); }

}  // namespace headroom::internal
#endif
