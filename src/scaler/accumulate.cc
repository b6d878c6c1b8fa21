#include <headroom/accumulate.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "apply/checks.h"
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

}  // namespace

GradAccumulator::GradAccumulator(std::vector<Parameter> parameters)
    : FusedOptimizer(Precision{}), unit_(StaticScale{.scale = 1.0f, .max_skips_in_row = 0}) {
  internal::check_parameters(parameters);
  size_t floats = 0;
  for (const Parameter& parameter : parameters)
    floats += internal::whole_lines(parameter.grad.count);
  auto memory = std::make_shared<internal::FloatBuffer>(floats);
  float* next = memory->data();
  memory_ = memory;
  summed_ = parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t count = parameters[i].grad.count;
    parameters[i].weight = TensorView{};
    if (count == 0) continue;  // no gradient, no sum
    summed_[i].grad = view(next, count);
    parameters[i].weight = summed_[i].grad;
    sums_.insert(next);
    next += internal::whole_lines(count);
  }
  append_group(std::move(parameters), adding());
}

void GradAccumulator::begin() {
  if (stepped_) {
    unit_.update();
    for (const Parameter& sum : summed_) {  // what optimizers that did not step have left of it
      if (bad_ && sum.grad.count > 0) std::memset(sum.grad.data, 0, sum.grad.bytes());
    }
    stepped_ = bad_ = false;
  }
  added_ = true;
}

void GradAccumulator::apply(float multiplier, bool clear_grads) {
  begin();
  FusedOptimizer::apply(multiplier, clear_grads);
}

void GradAccumulator::check_sum(size_t index, const TensorView& grad) const {
  const bool no_sum = index < summed_.size() && grad.count > 0 && summed_[index].grad.count == 0;
  internal::require(!no_sum, ErrorCode::kMismatch, [&] {
    return "Parameter '" + summed_[index].name +
           "' had no gradient when this accumulator was made, and has no sum; make a new one.";
  });
}

void GradAccumulator::set_grad(size_t index, const TensorView& grad) {
  check_sum(index, grad);
  FusedOptimizer::set_grad(index, grad);
}

// The weights that it updates are its sums.
void GradAccumulator::rebind(std::vector<Parameter> changed) {
  for (size_t i = 0; i < std::min(changed.size(), parameters().size()); ++i) {
    check_sum(i, changed[i].grad);
    changed[i].weight = parameters()[i].weight;
  }
  FusedOptimizer::rebind(std::move(changed));
}

// What it sums up has to know of every skip.
internal::CudaApply* GradAccumulator::cuda_side(int, internal::ApplyJob*) { return nullptr; }

void GradAccumulator::skipped(const std::string& culprit) {
  begin();
  bad_ = true;
  culprit_ = culprit;
}

StepReport GradAccumulator::step(Optimizer& optimizer, const StepOptions& options) {
  for (const Parameter& parameter : optimizer.parameters()) {
    const bool ours = parameter.grad.count == 0 || sums_.contains(parameter.grad.data);
    internal::require(ours, ErrorCode::kInvalidArgument, [&] {
      return "The gradient of parameter '" + parameter.name +
             "' is not one of this accumulator's sums; make the optimizer on summed().";
    });
  }
  internal::require(added_, ErrorCode::kWrongOrder, [] {
    return "step() was called before any gradient was added; step a scaler on the accumulator "
           "first.";
  });
  if (!stepped_) unit_.scale(1.0f);
  StepOptions clearing = options;
  clearing.clear_grads = ClearGrads::kAlways;
  StepReport report =
      bad_ ? unit_.skip(optimizer, clearing, culprit_) : unit_.step(optimizer, clearing);
  stepped_ = true;
  return report;
}

}  // namespace headroom
