// Compiles kernels-inl.h once per SIMD target and selects a kernel at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "apply/kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "apply/kernels-inl.h"
#include "core/simd.h"

#if HWY_ONCE
namespace headroom::internal {

HWY_EXPORT(apply_function_for_target);
HWY_EXPORT(follow_kernels_for_target);

ApplyFunction apply_function(const KernelKind& kind) {
  if (kind.state != StateFormat::kFull) return compact_function(kind);
  return HEADROOM_DISPATCH(apply_function_for_target)(kind);
}

FollowKernels follow_kernels(DType dtype) {
  return HEADROOM_DISPATCH(follow_kernels_for_target)(dtype);
}

}  // namespace headroom::internal
#endif
