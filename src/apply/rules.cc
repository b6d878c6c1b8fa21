#include "apply/rules.h"

#include <cmath>
#include <limits>
#include <string>

#include "core/check.h"

namespace headroom::internal {
namespace {

void check(bool ok, const char* what, double value, const char* rule) {
  require(ok, ErrorCode::kInvalidArgument, [&] {
    return std::string(what) + " is " + number(value) + "; it has to be " + rule + ".";
  });
}

// As a float, which is what the kernels compute with.
bool not_negative(double value) {
  return value >= 0.0 && value <= std::numeric_limits<float>::max();
}

}  // namespace

void validate(const RuleSettings& settings) {
  check(not_negative(settings.lr), "lr", settings.lr, "a finite number, 0 or more");
  check(not_negative(settings.weight_decay), "weight_decay", settings.weight_decay,
        "a finite number, 0 or more");
  check(not_negative(settings.lr * settings.weight_decay), "lr", settings.lr,
        "smaller: lr x weight_decay has to be a number that FP32 has");
  if (settings.rule == Rule::kAdam) {
    const char* range = "at least 0 and below 1";
    check(settings.beta1 >= 0.0 && settings.beta1 < 1.0, "beta1", settings.beta1, range);
    check(settings.beta2 >= 0.0 && settings.beta2 < 1.0, "beta2", settings.beta2, range);
    check(settings.eps >= std::numeric_limits<float>::min() && not_negative(settings.eps), "eps",
          settings.eps, "a number above 0 that FP32 has; without it a zero gradient divides by 0");
    check(not_negative(settings.lr / (1.0 - settings.beta1)), "lr", settings.lr,
          "smaller: lr / (1 - beta1) has to be a number that FP32 has");
    return;
  }
  check(not_negative(settings.momentum), "momentum", settings.momentum,
        "a finite number, 0 or more");
  check(not_negative(std::fabs(settings.dampening)), "dampening", settings.dampening,
        "a finite number");
  require(!settings.nesterov || (settings.momentum > 0.0 && settings.dampening == 0.0),
          ErrorCode::kInvalidArgument, [] {
            return "Nesterov needs momentum above 0 and dampening 0; set them, or nesterov = "
                   "false.";
          });
}

}  // namespace headroom::internal
