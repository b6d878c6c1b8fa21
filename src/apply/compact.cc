// Compiles compact-inl.h once per SIMD target and selects a kernel at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "apply/compact.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "apply/compact-inl.h"
#include "core/simd.h"

#if HWY_ONCE
namespace headroom::internal {

HWY_EXPORT(compact_function_for_target);

ApplyFunction compact_function(const KernelKind& kind) {
  return HEADROOM_DISPATCH(compact_function_for_target)(kind);
}

}  // namespace headroom::internal
#endif
