// Selects the SIMD target that kernels run on. A file with kernels compiles its x-inl.h once per
// target and calls the version that HEADROOM_DISPATCH returns. Highway's own dispatch is not used,
// because the target can be changed at run time (set_simd_target).
#ifndef HEADROOM_SRC_CORE_SIMD_H_
#define HEADROOM_SRC_CORE_SIMD_H_

#include <headroom/export.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

namespace headroom::internal {

/// The target in use, as a bit of Highway's target mask.
HEADROOM_API int64_t active_target();

/// Index of `target` in a table made by HWY_EXPORT. Inline, because the tables of a file have the
/// targets that this file was compiled for.
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
