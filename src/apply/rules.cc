// Checks the options of update rules.
#include "apply/rules.h"

#include <cmath>
#include <limits>

#include "core/check.h"

namespace headroom::internal {
namespace {

// 0 or more, and finite as a float, which is what the kernels compute with.
bool not_negative(double value) {
  return value >= 0.0 && value <= std::numeric_limits<float>::max();
}

}  // namespace

void validate(const RuleSettings& settings) {
  check_value(not_negative(settings.lr), "lr", settings.lr, "a finite number, 0 or more");
  check_value(not_negative(settings.weight_decay), "weight_decay", settings.weight_decay,
              "a finite number, 0 or more");
  check_value(not_negative(settings.lr * settings.weight_decay), "lr", settings.lr,
              "smaller: lr x weight_decay has to be within the range of FP32");
  const char* range = "at least 0 and below 1";
  check_value(settings.beta1 >= 0.0 && settings.beta1 < 1.0, "beta1", settings.beta1, range);
  check_value(settings.beta2 >= 0.0 && settings.beta2 < 1.0, "beta2", settings.beta2, range);
  if (settings.rule == Rule::kAdam) {
    check_value(settings.eps >= std::numeric_limits<float>::min() && not_negative(settings.eps),
                "eps", settings.eps,
                "a normal FP32 number above 0; without it a zero gradient divides by 0");
    check_value(not_negative(settings.lr / (1.0 - settings.beta1)), "lr", settings.lr,
                "smaller: lr / (1 - beta1) has to be within the range of FP32");
    return;
  }
  check_value(not_negative(settings.momentum), "momentum", settings.momentum,
              "a finite number, 0 or more");
  check_value(not_negative(std::fabs(settings.dampening)), "dampening", settings.dampening,
              "a finite number");
  require(!settings.nesterov || (settings.momentum > 0.0 && settings.dampening == 0.0),
          ErrorCode::kInvalidArgument,
          "Nesterov needs momentum above 0 and dampening 0; set them, or nesterov = false.");
}

}  // namespace headroom::internal
