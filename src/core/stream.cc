// The stack of StreamScopes: one current stream per thread.
#include <headroom/runtime.h>

#include "core/cuda.h"

namespace headroom {
namespace {

thread_local Stream g_current(nullptr);

}  // namespace

StreamScope::StreamScope(Stream stream) : before_(g_current) {
  if (stream.given()) g_current = stream;
}
StreamScope::~StreamScope() { g_current = before_; }

void* internal::stream_on(int device) { return g_current.on(device); }

}  // namespace headroom
