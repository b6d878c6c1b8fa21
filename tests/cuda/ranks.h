// A small model on the device with a device scaler, for the GPU tests of ranks.
#ifndef HEADROOM_TESTS_CUDA_RANKS_H_
#define HEADROOM_TESTS_CUDA_RANKS_H_

#include <memory>

#include "tests/cuda/support.h"

namespace headroom {

class DeviceModel {
 public:
  explicit DeviceModel(std::shared_ptr<Ranks> ranks,
                       RankGradients kind = RankGradients::kReplicated,
                       const std::string& name = "w")
      : scaler(DynamicScale{.init_scale = 1024.0f, .growth_interval = 3},
               {.device = {DeviceType::kCUDA, 0}, .ranks = std::move(ranks), .gradients = kind}),
        weights_(DType::kF32, kCount, 1),
        grads_(DType::kF32, kCount, 2),
        one_(DType::kF32, 1, 3),
        device_weights_(weights_.view()),
        device_grads_(grads_.view()),
        loss_(one_.view()),
        scaled_(one_.view()),
        optimizer({{name, device_weights_.view(), device_grads_.view()}}) {}

  // Only enqueues. By default the gradients are left unchanged.
  void step(const StepOptions& options = {.clear_grads = ClearGrads::kNever}) {
    scaler.scale(loss_.view(), scaled_.view());
    scaler.step(optimizer, options);
    scaler.update();
  }

  void write_gradients(unsigned seed, double bad = 0.0) {
    grads_.refill_exactly(seed, 64.0);
    if (bad != 0.0) grads_.set(5, bad);
    device_grads_.write(grads_.view());
  }

  std::vector<unsigned char> weights() const {
    cudaDeviceSynchronize();
    return device_weights_.bytes();
  }

  static constexpr int64_t kCount = 5000;
  GradScaler scaler;

 private:
  HostTensor weights_, grads_, one_;
  DeviceCopy device_weights_, device_grads_, loss_, scaled_;

 public:
  AdamW optimizer;
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_CUDA_RANKS_H_
