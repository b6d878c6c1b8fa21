// What the GPU tests of ranks share: a small model on the device, under a scaler that lives there.
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
        weights_there_(weights_.view()),
        grads_there_(grads_.view()),
        loss_(one_.view()),
        scaled_(one_.view()),
        optimizer({{name, weights_there_.view(), grads_there_.view()}}) {}

  // Only enqueues. The gradients stay as they were put.
  void step(const StepOptions& options = {.clear_grads = ClearGrads::kNever}) {
    scaler.scale(loss_.view(), scaled_.view());
    scaler.step(optimizer, options);
    scaler.update();
  }

  void put(unsigned seed, double bad = 0.0) {
    grads_.refill_exactly(seed, 64.0);
    if (bad != 0.0) grads_.set(5, bad);
    grads_there_.put(grads_.view());
  }

  std::vector<unsigned char> weights() const {
    cudaDeviceSynchronize();
    return weights_there_.bytes();
  }

  static constexpr int64_t kCount = 5000;
  GradScaler scaler;

 private:
  Host weights_, grads_, one_;
  OnDevice weights_there_, grads_there_, loss_, scaled_;

 public:
  AdamW optimizer;
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_CUDA_RANKS_H_
