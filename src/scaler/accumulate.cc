#include <headroom/accumulate.h>

#include <algorithm>

#include "apply/rules.h"
#include "core/buffer.h"
#include "core/check.h"

namespace headroom {
namespace {

// sum - (-1) x gradient x multiplier: plain SGD adds gradients to FP32 sums.
internal::RuleSettings adding() {
  internal::RuleSettings settings;
  settings.rule = internal::Rule::kSgd;
  settings.lr = -1.0;
  return settings;
}

size_t padded(int64_t count) {
  return (static_cast<size_t>(std::max<int64_t>(count, 0)) + 15) / 16 * 16;
}

}  // namespace

GradAccumulator::GradAccumulator(std::vector<Parameter> parameters)
    : FusedOptimizer(Precision{}), unit_(NoScale{}) {
  size_t floats = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    internal::check_view(parameters[i].grad, internal::Access::kWrite,
                         [&] { return "The gradient of parameter " + parameters[i].name; });
    floats += padded(parameters[i].grad.count);
  }
  auto memory = std::make_shared<internal::FloatBuffer>(floats);
  float* next = memory->data();
  memory_ = memory;
  summed_ = parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t count = parameters[i].grad.count;
    summed_[i].grad = view(next, count);
    parameters[i].weight = summed_[i].grad;
    next += padded(count);
  }
  append_group(std::move(parameters), adding());
}

void GradAccumulator::open_round() {
  if (!stepped_) return;
  stepped_ = false;
  bad_ = false;
}

void GradAccumulator::apply(float multiplier, bool clear_grads) {
  open_round();
  FusedOptimizer::apply(multiplier, clear_grads);
}

void GradAccumulator::skipped(const std::string& culprit) {
  open_round();
  bad_ = true;
  culprit_ = culprit;
}

StepReport GradAccumulator::step(Optimizer& optimizer, const StepOptions& options) {
  for (const Parameter& parameter : optimizer.parameters()) {
    const bool ours = std::any_of(summed_.begin(), summed_.end(), [&](const Parameter& sum) {
      return sum.grad.data == parameter.grad.data;
    });
    internal::require(ours, ErrorCode::kInvalidArgument, [&] {
      return "The gradient of parameter '" + parameter.name +
             "' is not one of this accumulator's sums; make the optimizer on summed().";
    });
  }
  stepped_ = true;
  if (bad_) {
    optimizer.zero_grad();
    optimizer.skipped(culprit_);
    StepReport report;
    report.skip = Skip::kNotFinite;
    report.culprit = culprit_;
    return report;
  }
  unit_.scale(1.0f);
  StepOptions clearing = options;
  clearing.clear_grads = ClearGrads::kAlways;
  const StepReport report = unit_.step(optimizer, clearing);
  unit_.update();
  return report;
}

}  // namespace headroom
