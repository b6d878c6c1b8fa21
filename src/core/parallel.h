// The one place where threads are started.
#ifndef HEADROOM_SRC_CORE_PARALLEL_H_
#define HEADROOM_SRC_CORE_PARALLEL_H_

#include <headroom/export.h>

#include <cstddef>
#include <functional>

namespace headroom::internal {

/// Calls work(i) for every i in [0, count), on several threads if `bytes` (the memory the whole
/// loop touches) makes it worth their start. `work` must not throw and must not depend on the order
/// of the calls. Inside, floating point is in the default environment: round to nearest, subnormals
/// kept, whatever the caller has set.
HEADROOM_API void parallel_for(size_t count, size_t bytes, const std::function<void(size_t)>& work);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_PARALLEL_H_
