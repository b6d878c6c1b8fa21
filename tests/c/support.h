// Helpers for the tests of the C API.
#ifndef HEADROOM_TESTS_C_SUPPORT_H_
#define HEADROOM_TESTS_C_SUPPORT_H_

#include <gtest/gtest.h>
#include <headroom/c.h>

#include <string>
#include <vector>

namespace headroom {

#define EXPECT_OK(call) EXPECT_EQ(call, HR_OK) << hr_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, HR_OK) << hr_last_error()

inline bool last_error_has(const std::string& text) {
  return std::string(hr_last_error()).find(text) != std::string::npos;
}

/// A zeroed struct with its `size` member set.
template <typename Struct>
Struct sized() {
  Struct value = {};
  value.size = sizeof(value);
  return value;
}

/// The text that a function of the C API returns.
template <typename Function, typename... Arguments>
std::string text_of(Function function, Arguments... arguments) {
  size_t needed = 0;
  EXPECT_OK(function(arguments..., nullptr, 0, &needed));
  std::string text(needed, 'x');
  EXPECT_OK(function(arguments..., text.data(), text.size(), nullptr));
  text.pop_back();
  return text;
}

/// One FP32 parameter of ten elements with an SGD optimizer and a scaler.
struct Training {
  explicit Training(const char* policy = nullptr, const hr_scaler_options* options = nullptr) {
    EXPECT_OK(hr_fused_create(HR_SGD, &parameter, 1, nullptr, nullptr, &optimizer));
    EXPECT_OK(hr_scaler_create(policy, options, &scaler));
  }
  ~Training() {
    hr_optimizer_destroy(optimizer);
    hr_scaler_destroy(scaler);
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  /// Scales the loss and steps with an unscaled gradient of `value`; does not update.
  hr_status step(float value, hr_report* report = nullptr) {
    float scale = 0.0f;
    EXPECT_OK(hr_scaler_scale(scaler, 1.0f, &scale));
    for (float& g : grad) g = value * scale;
    return hr_scaler_step(scaler, optimizer, nullptr, report);
  }

  std::vector<float> weight = std::vector<float>(10, 1.0f), grad = std::vector<float>(10);
  hr_parameter parameter = {"w", hr_cpu_tensor(weight.data(), HR_F32, 10),
                            hr_cpu_tensor(grad.data(), HR_F32, 10)};
  hr_optimizer* optimizer = nullptr;
  hr_scaler* scaler = nullptr;
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_C_SUPPORT_H_
