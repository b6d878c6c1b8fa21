// Counts what a step asks of CUDA, with the profiler's own interface.
#include <cupti.h>

#include <atomic>

#include "tests/cuda/support.h"

namespace headroom {
namespace {

// Calls of the runtime and the driver as long as it lives, by kind.
class Counted {
 public:
  Counted() {
    subscribed_ = cuptiSubscribe(&subscriber_, reinterpret_cast<CUpti_CallbackFunc>(&called),
                                 this) == CUPTI_SUCCESS;
    if (!subscribed_) return;
    cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_RUNTIME_API);
    cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API);
  }
  ~Counted() {
    if (subscribed_) cuptiUnsubscribe(subscriber_);
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  bool subscribed() const { return subscribed_; }

  std::atomic<int> waits = 0, copies = 0, memory = 0, launches = 0;

 private:
  static void CUPTIAPI called(void* self, CUpti_CallbackDomain, CUpti_CallbackId,
                              const CUpti_CallbackData* data) {
    if (data->callbackSite != CUPTI_API_ENTER) return;
    auto* const counted = static_cast<Counted*>(self);
    const std::string name = data->functionName;
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    counted->waits += has("Synchronize");
    counted->copies += has("Memcpy");
    counted->memory += has("Alloc") || has("Free");
    counted->launches += has("Launch");
  }

  CUpti_SubscriberHandle subscriber_ = nullptr;
  bool subscribed_ = false;
};

TEST_F(Cuda, AStepOnTheDeviceWaitsForNothingAndTakesNoMemory) {
  Host weight(DType::kF16, 5000, 1), grad(DType::kF16, 5000, 2), one(DType::kF32, 1, 3);
  const OnDevice weights(weight.view()), grads(grad.view()), loss(one.view()), scaled(one.view());
  AdamW optimizer({{"w", weights.view(), grads.view()}});
  GradScaler scaler(DynamicScale{.growth_interval = 3}, {.device = {DeviceType::kCUDA, 0}});
  const auto step = [&] {
    scaler.scale(loss.view(), scaled.view());
    scaler.step(optimizer, {.max_norm = 1.0f});
    scaler.update();
    scaler.try_report();
  };
  step();
  scaler.report();
  Counted counted;
  if (!counted.subscribed()) GTEST_SKIP() << "another tool is counting already";
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(counted.waits, 0);
  EXPECT_EQ(counted.copies, 0);
  EXPECT_EQ(counted.memory, 0);
  EXPECT_GE(counted.launches, 20 * 5) << "so calls are counted";
  scaler.report();
  EXPECT_GE(counted.waits, 1) << "so waits are counted";
}

}  // namespace
}  // namespace headroom
