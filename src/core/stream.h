#ifndef HEADROOM_SRC_CORE_STREAM_H_
#define HEADROOM_SRC_CORE_STREAM_H_

#include <headroom/runtime.h>

namespace headroom::internal {

/// The cudaStream_t of the innermost StreamScope of this thread, for work on this device.
void* stream_on(int device);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_STREAM_H_
