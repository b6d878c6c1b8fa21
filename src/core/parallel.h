// The only place where the library starts threads.
#ifndef HEADROOM_SRC_CORE_PARALLEL_H_
#define HEADROOM_SRC_CORE_PARALLEL_H_

#include <headroom/export.h>

#include <cstddef>
#include <functional>

namespace headroom::internal {

/// Calls work(i) for every i in [0, count) and returns when all calls have returned. Uses several
/// threads if `bytes`, the memory that the whole loop touches, is large enough to pay for waking
/// them. `work` must not throw and must not depend on the order of the calls. It runs in the
/// default floating-point environment.
HEADROOM_API void parallel_for(size_t count, size_t bytes, const std::function<void(size_t)>& work);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_PARALLEL_H_
