// Counts the CUDA calls of a step through CUPTI.
#include <cupti.h>

#include <atomic>

#include "tests/cuda/support.h"

namespace headroom {
namespace {

// Counts the calls to the CUDA runtime and driver during its lifetime, by kind.
class CudaCallCounter {
 public:
  CudaCallCounter() {
    subscribed_ = cuptiSubscribe(&subscriber_, reinterpret_cast<CUpti_CallbackFunc>(&called),
                                 this) == CUPTI_SUCCESS;
    if (!subscribed_) return;
    cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_RUNTIME_API);
    cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API);
  }
  ~CudaCallCounter() {
    if (subscribed_) cuptiUnsubscribe(subscriber_);
  }
  CudaCallCounter(const CudaCallCounter&) = delete;
  CudaCallCounter& operator=(const CudaCallCounter&) = delete;

  bool subscribed() const { return subscribed_; }

  std::atomic<int> waits = 0, copies = 0, allocations = 0, launches = 0;

 private:
  static void CUPTIAPI called(void* self, CUpti_CallbackDomain, CUpti_CallbackId,
                              const CUpti_CallbackData* data) {
    if (data->callbackSite != CUPTI_API_ENTER) return;
    auto* const calls = static_cast<CudaCallCounter*>(self);
    const std::string name = data->functionName;
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    calls->waits += has("Synchronize");
    calls->copies += has("Memcpy");
    calls->allocations += has("Alloc") || has("Free");
    calls->launches += has("Launch");
  }

  CUpti_SubscriberHandle subscriber_ = nullptr;
  bool subscribed_ = false;
};

TEST_F(Cuda, DeviceStepDoesNotSynchronizeCopyOrAllocate) {
  HostTensor weight(DType::kF16, 5000, 1), grad(DType::kF16, 5000, 2), one(DType::kF32, 1, 3);
  const DeviceCopy weights(weight.view()), grads(grad.view()), loss(one.view()), scaled(one.view());
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
  CudaCallCounter calls;
  if (!calls.subscribed()) GTEST_SKIP() << "another tool has subscribed to CUPTI";
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(calls.waits, 0);
  EXPECT_EQ(calls.copies, 0);
  EXPECT_EQ(calls.allocations, 0);
  EXPECT_GE(calls.launches, 20 * 5) << "the counter works";
  scaler.report();
  EXPECT_GE(calls.waits, 1) << "the counter works";
}

}  // namespace
}  // namespace headroom
