// Threads that each have their own scaler and optimizer do not disturb one another.
#include <thread>

#include "tests/support.h"

namespace headroom {
namespace {

std::string train(uint32_t seed) {
  std::vector<f16> weight = random_values<f16>(300000, seed), grad(300000);
  AdamW optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler(DynamicScale{.growth_interval = 2});
  for (uint32_t step = 0; step < 6; ++step) {
    refill(grad, random_values<f16>(grad.size(), seed + step, 100.0));
    if (step == 3) grad[step] = f16(kInf);
    scaler.scale(1.0f);
    scaler.step(optimizer, {.max_norm = 1.0f});
    scaler.update();
  }
  return scaler.save() + fingerprint(measure({view(weight)}));
}

TEST(Concurrency, ThreadsWithTheirOwnObjectsGetTheSameResults) {
  set_num_threads(2);
  const std::string expected = train(1);
  std::vector<std::string> found(4);
  std::vector<std::thread> threads;
  for (std::string& result : found) {
    threads.emplace_back([&result] { result = train(1); });
  }
  for (std::thread& thread : threads) thread.join();
  set_num_threads(0);
  for (const std::string& result : found) EXPECT_EQ(result, expected);
}

TEST(Concurrency, ManyThreadsMayMeasureTheSameGradients) {
  const std::vector<float> grad = random_values<float>(500000, 5);
  const std::string expected = fingerprint(measure({view(grad)}));
  std::vector<std::thread> threads;
  std::vector<std::string> found(4);
  for (std::string& result : found) {
    threads.emplace_back([&] { result = fingerprint(measure({view(grad)})); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& result : found) EXPECT_EQ(result, expected);
}

}  // namespace
}  // namespace headroom
