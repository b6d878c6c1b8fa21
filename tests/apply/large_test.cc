// Tensors of more than 2^31 elements, in memory that is not there: gradients are one page of zeros,
// seen over and over, and so is one piece of the weights.
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support.h"

namespace headroom {
namespace {

TEST(LargeTensors, AreUpdatedBehindTwoToThe31) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer would need 16 GiB to watch this much memory";
#endif
  constexpr size_t kPiece = size_t{64} << 20;  // bytes
  constexpr int64_t kWhole = int64_t{1} << 31, kCount = kWhole + 77;
  const size_t bytes = static_cast<size_t>(kWhole) * sizeof(bf16) + kPiece;
  const auto map = [&](void* at, size_t size, int flags, int file) {
    return mmap(at, size, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file, 0);
  };
  void* const weights = map(nullptr, bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  void* const grads = map(nullptr, bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  const int piece = memfd_create("piece", 0);
  ASSERT_TRUE(weights != MAP_FAILED && grads != MAP_FAILED && piece >= 0);
  ASSERT_EQ(ftruncate(piece, kPiece), 0);
  for (size_t at = 0; at + kPiece < bytes; at += kPiece) {  // all but the last, which is its own
    ASSERT_NE(map(static_cast<char*>(weights) + at, kPiece, MAP_SHARED | MAP_FIXED, piece),
              MAP_FAILED);
  }
  bf16* const w = static_cast<bf16*>(weights);
  bf16* const g = static_cast<bf16*>(grads);
  for (size_t i = 0; i < kPiece / sizeof(bf16); ++i) w[i] = bf16(1.0f);
  for (int64_t i = kWhole; i < kCount; ++i) w[i] = bf16(1.0f);
  g[kWhole + 3] = bf16(65536.0f);

  SGD optimizer({{"w", view(w, kCount), view(g, kCount)}}, {.lr = 0.5}, {.master_weights = false});
  GradScaler scaler;
  scaler.scale(1.0f);
  const StepReport report = scaler.step(optimizer, {.clear_grads = ClearGrads::kNever});
  EXPECT_TRUE(report.applied);
  EXPECT_EQ(report.grad_norm, 1.0);
  EXPECT_EQ(report.stats.count, kCount);
  for (int64_t i = kWhole; i < kCount; ++i) {
    EXPECT_EQ(static_cast<float>(w[i]), i == kWhole + 3 ? 0.5f : 1.0f) << i;
  }
  for (size_t i = 0; i < kPiece / sizeof(bf16); ++i) ASSERT_EQ(static_cast<float>(w[i]), 1.0f) << i;
  close(piece);
  munmap(weights, bytes);
  munmap(grads, bytes);
}

}  // namespace
}  // namespace headroom
