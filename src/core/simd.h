// Which SIMD target the kernels run on. A unit with kernels compiles its x-inl.h once per target,
// makes one table of functions for each, and asks here which to take.
#ifndef HEADROOM_SRC_CORE_SIMD_H_
#define HEADROOM_SRC_CORE_SIMD_H_

#include <headroom/export.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

namespace headroom::internal {

/// The target in use, as a bit of Highway's target mask.
HEADROOM_API int64_t active_target();

/// Index of `target` in a table made by HWY_EXPORT in the calling unit.
inline size_t table_index(int64_t target) {
  hwy::ChosenTarget chosen;
  chosen.Update(target);
  return chosen.GetIndex();
}

}  // namespace headroom::internal

/// The function that HWY_EXPORT(function) registered, compiled for the target in use.
#define HEADROOM_DISPATCH(function) \
  (*(HWY_DISPATCH_TABLE(            \
      function)[::headroom::internal::table_index(::headroom::internal::active_target())]))

#endif  // HEADROOM_SRC_CORE_SIMD_H_
