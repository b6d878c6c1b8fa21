// Tensors of more than 2^31 elements without the memory for them: unwritten pages of the gradients
// share one page of zeros, and one 64 MiB block is mapped repeatedly as the weights.
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support.h"

namespace headroom {
namespace {

TEST(LargeTensors, ElementsBeyondTwoToThe31AreUpdated) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer would need 16 GiB of shadow memory";
#endif
  constexpr size_t kBlockBytes = size_t{64} << 20;
  constexpr int64_t kTwoTo31 = int64_t{1} << 31, kCount = kTwoTo31 + 77;
  const size_t bytes = static_cast<size_t>(kTwoTo31) * sizeof(bf16) + kBlockBytes;
  const auto map = [&](void* address, size_t size, int flags, int file) {
    return mmap(address, size, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file, 0);
  };
  void* const weights = map(nullptr, bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  void* const grads = map(nullptr, bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  const int block = memfd_create("block", 0);
  ASSERT_TRUE(weights != MAP_FAILED && grads != MAP_FAILED && block >= 0);
  ASSERT_EQ(ftruncate(block, kBlockBytes), 0);
  for (size_t offset = 0; offset + kBlockBytes < bytes;
       offset += kBlockBytes) {  // the last block is private
    ASSERT_NE(map(static_cast<char*>(weights) + offset, kBlockBytes, MAP_SHARED | MAP_FIXED, block),
              MAP_FAILED);
  }
  bf16* const w = static_cast<bf16*>(weights);
  bf16* const g = static_cast<bf16*>(grads);
  for (size_t i = 0; i < kBlockBytes / sizeof(bf16); ++i) w[i] = bf16(1.0f);
  for (int64_t i = kTwoTo31; i < kCount; ++i) w[i] = bf16(1.0f);
  g[kTwoTo31 + 3] = bf16(65536.0f);

  SGD optimizer({{"w", view(w, kCount), view(g, kCount)}}, {.lr = 0.5}, {.master_weights = false});
  GradScaler scaler;
  scaler.scale(1.0f);
  const StepReport report = scaler.step(optimizer, {.clear_grads = ClearGrads::kNever});
  EXPECT_TRUE(report.applied);
  EXPECT_EQ(report.grad_norm, 1.0);
  EXPECT_EQ(report.stats.count, kCount);
  for (int64_t i = kTwoTo31; i < kCount; ++i) {
    EXPECT_EQ(static_cast<float>(w[i]), i == kTwoTo31 + 3 ? 0.5f : 1.0f) << i;
  }
  for (size_t i = 0; i < kBlockBytes / sizeof(bf16); ++i)
    ASSERT_EQ(static_cast<float>(w[i]), 1.0f) << i;
  close(block);
  munmap(weights, bytes);
  munmap(grads, bytes);
}

}  // namespace
}  // namespace headroom
