// The choice of SIMD target, threads, fork() and error codes.
#include <dlfcn.h>
#include <strings.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "tests/support.h"

namespace headroom {
namespace {

TEST(Runtime, CpuViewsDoNotLoadTheCudaDriver) {
  const auto loaded = [] { return dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD) != nullptr; };
  if (loaded()) GTEST_SKIP() << "another test in this process has loaded the driver";
  std::vector<float> weight(4), grad(4);
  AdamW optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(optimizer);
  EXPECT_EQ(measure({view(grad)}).count, 4);
  EXPECT_FALSE(loaded());
}

TEST(Runtime, EveryListedSimdTargetCanBeSelected) {
  const std::string before = simd_target();
  ASSERT_FALSE(simd_targets().empty());
  for (const std::string& name : simd_targets()) {
    set_simd_target(name);
    EXPECT_EQ(simd_target(), name);
  }
  set_simd_target(before);
}

TEST(Runtime, UnknownSimdTargetIsRejectedWithoutEffect) {
  const std::string before = simd_target();
  expect_error(ErrorCode::kInvalidArgument, "SIMD target 'MMX'", [] { set_simd_target("MMX"); });
  EXPECT_EQ(simd_target(), before);
}

TEST(Runtime, EnvironmentForcesTheSimdTarget) {
  const char* forced = std::getenv("HEADROOM_SIMD");
  if (forced == nullptr) {
    EXPECT_EQ(simd_target(), simd_targets().front());
    return;
  }
  const auto targets = simd_targets();
  const bool runnable = std::any_of(targets.begin(), targets.end(), [&](const std::string& name) {
    return strcasecmp(name.c_str(), forced) == 0;
  });
  if (!runnable) GTEST_SKIP() << forced << " is not supported by this machine";
  EXPECT_EQ(strcasecmp(simd_target().c_str(), forced), 0) << simd_target();
}

TEST(Runtime, ThreadCountCanBeSet) {
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  set_num_threads(0);
  EXPECT_GE(num_threads(), 1);
  expect_error(ErrorCode::kInvalidArgument, "set_num_threads", [] { set_num_threads(-1); });
}

// Data loaders and Python's multiprocessing fork. OpenMP's thread pool does not survive a fork, so
// the child must not use it.
TEST(Runtime, ForkedChildRunsSingleThreaded) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not support fork() in a process with threads";
#endif
  set_num_threads(4);
  std::vector<float> values(size_t{1} << 22, 1.0f);
  values.back() = std::numeric_limits<float>::infinity();
  ASSERT_EQ(measure({view(values)}).inf_count, 1);  // starts OpenMP's thread pool
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);  // SIGALRM kills a child that hangs
    _exit(measure({view(values)}).inf_count == 1 && num_threads() == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(num_threads(), 4);
  set_num_threads(0);
}

TEST(Errors, EveryErrorCodeHasAName) {
  for (int code = 0; code <= static_cast<int>(ErrorCode::kRanksDiffer); ++code) {
    EXPECT_STRNE(to_string(static_cast<ErrorCode>(code)), "unknown");
  }
}

}  // namespace
}  // namespace headroom
