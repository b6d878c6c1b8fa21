// Models of one parameter that the tests of GradScaler share.
#ifndef HEADROOM_TESTS_SCALER_SUPPORT_H_
#define HEADROOM_TESTS_SCALER_SUPPORT_H_

#include "tests/support.h"

namespace headroom {

/// Three FP16 weights of 1 under SGD.
struct Loop {
  std::vector<f16> weight = std::vector<f16>(3, f16(1.0f));
  std::vector<f16> grad = std::vector<f16>(3);
  SGD optimizer;

  explicit Loop(const SGDOptions& options = {.lr = 1.0})
      : optimizer({{"w", view(weight), view(grad)}}, options) {}

  /// Simulates backward: the unscaled gradient of each element is `value`.
  void backward(float scaled_loss, float value) {
    for (f16& g : grad) g = f16(value * scaled_loss);
  }
};

/// One FP32 weight of 1 under SGD. Tests write the gradient themselves.
struct OneWeight {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  SGD optimizer{{{"w", view(weight), view(grad)}}};
};

inline void expect_wrong_order(const std::string& part, const std::function<void()>& call) {
  expect_error(ErrorCode::kWrongOrder, part, call);
}

}  // namespace headroom

#endif  // HEADROOM_TESTS_SCALER_SUPPORT_H_
