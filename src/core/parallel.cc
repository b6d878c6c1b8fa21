// parallel_for() on OpenMP, the number of threads, and what TSan and fork() need.
#include "core/parallel.h"

#include <headroom/runtime.h>
#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>

#include "core/check.h"
#include "core/float_environment.h"
#include "core/simd.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define HEADROOM_TSAN_RELEASE(address) __tsan_release(address)
#define HEADROOM_TSAN_ACQUIRE(address) __tsan_acquire(address)
#else
#define HEADROOM_TSAN_RELEASE(address) (void)(address)
#define HEADROOM_TSAN_ACQUIRE(address) (void)(address)
#endif

namespace headroom {
namespace {

std::atomic<int> g_threads{0};

// True in a process that was forked while this library was loaded. Only the thread that called
// fork() exists in the child, but libgomp still believes in its whole pool: a parallel region would
// wait for the missing threads forever. A forked child therefore uses one thread.
std::atomic<bool> g_forked{false};
[[maybe_unused]] const int g_fork_handler =
    pthread_atfork(nullptr, nullptr, [] { g_forked = true; });

}  // namespace

void set_num_threads(int threads) {
  internal::require(threads >= 0, ErrorCode::kInvalidArgument, [&] {
    return "set_num_threads got " + std::to_string(threads) +
           "; pass a number from 1 up, or 0 for the default.";
  });
  g_threads = threads;
}

int num_threads() {
  if (g_forked) return 1;
  const int set = g_threads;
  return set > 0 ? set : omp_get_max_threads();
}

namespace internal {
namespace {

// With less memory per thread than this, waking a thread costs more than it saves.
constexpr size_t kBytesPerThread = size_t{1} << 18;

// One parallel loop. Threads take indices from `next` until none is left.
struct Region {
  size_t count;
  const std::function<void(size_t)>* work;
  std::atomic<size_t> next{0};
};

[[gnu::noinline]] void run_share(Region* region) {
  HEADROOM_TSAN_ACQUIRE(region);
  {
    DefaultFloatEnvironment environment;
    for (size_t i; (i = region->next.fetch_add(1)) < region->count;) (*region->work)(i);
  }
  HEADROOM_TSAN_RELEASE(region);
}

// libgomp is not built with TSan, so TSan does not see that the threads of a region start after and
// end before the code around it. run_share() annotates both edges. This function is not
// instrumented, because here the compiler itself shares variables with those threads.
__attribute__((no_sanitize("thread"))) void run_region(Region* region, int threads) {
#pragma omp parallel num_threads(threads)
  run_share(region);
}

}  // namespace

void parallel_for(size_t count, size_t bytes, const std::function<void(size_t)>& work) {
  const size_t useful = std::min(count, bytes / kBytesPerThread);
  const int threads = static_cast<int>(std::min<size_t>(useful, num_threads()));
  Region region{count, &work};
  active_target();  // throws here, and not in a thread, if HEADROOM_SIMD is invalid
  if (threads <= 1) return run_share(&region);
  HEADROOM_TSAN_RELEASE(&region);
  run_region(&region, threads);
  HEADROOM_TSAN_ACQUIRE(&region);
}

}  // namespace internal
}  // namespace headroom
