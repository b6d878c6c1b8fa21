// GradAccumulator: an optimizer whose "weights" are FP32 sums of gradients.
#include <headroom/accumulate.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "apply/checks.h"
#include "apply/rules.h"
#include "core/buffer.h"
#include "core/check.h"
#include "scaler/scaler.h"

namespace headroom {

namespace internal {

struct Accumulator {
  Accumulator(size_t floats, const std::vector<Parameter>& parameters)
      : memory(floats), summed(parameters) {}

  FloatBuffer memory;  // of the sums
  std::vector<Parameter> summed;
  std::unordered_set<const void*> sums;  // their addresses
  GradScaler unit_scaler{
      StaticScale{.scale = 1.0f, .max_skips_in_row = 0}};  // steps the real optimizers
  bool added = false;                                      // gradients were added in this round
  bool stepped = false;                                    // the next gradient begins a new round
  bool bad = false;  // a gradient of this round was not finite
  std::string culprit;

  // Called for every gradient, good or bad, before it is added.
  void begin() {
    if (stepped) {
      unit_scaler.update();
      // Optimizers that were not stepped have left their part of a bad sum.
      for (const Parameter& sum : summed) {
        if (bad && sum.grad.count > 0) std::memset(sum.grad.data, 0, sum.grad.bytes());
      }
      stepped = bad = false;
    }
    added = true;
  }

  // Throws if a parameter without a sum gets a gradient.
  void check_sum(size_t index, const TensorView& grad) const {
    const bool no_sum = index < summed.size() && grad.count > 0 && summed[index].grad.count == 0;
    require(!no_sum, ErrorCode::kMismatch, [&] {
      return "Parameter '" + summed[index].name +
             "' had no gradient when this accumulator was made, and has no sum; make a new one.";
    });
  }
};

namespace {

// The size of all sums. Checks the parameters first, since their counts may be anything.
size_t floats_for(const std::vector<Parameter>& parameters) {
  check_parameters(parameters);
  size_t floats = 0;
  for (const Parameter& parameter : parameters) floats += whole_lines(parameter.grad.count);
  return floats;
}

// The parameter without its weight, master and moments, which belong to the real optimizer.
Parameter gradient_only(Parameter parameter) {
  return {std::move(parameter.name), {}, parameter.grad, {}, {}, {}, parameter.counted};
}

}  // namespace
}  // namespace internal

GradAccumulator::GradAccumulator(std::vector<Parameter> parameters)
    : FusedOptimizer(Precision{}),
      impl_(std::make_unique<internal::Accumulator>(internal::floats_for(parameters), parameters)) {
  float* next = impl_->memory.data();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t count = parameters[i].grad.count;
    parameters[i] = internal::gradient_only(std::move(parameters[i]));
    if (count == 0) continue;  // no gradient, no sum
    impl_->summed[i].grad = view(next, count);
    parameters[i].weight = impl_->summed[i].grad;
    impl_->sums.insert(next);
    next += internal::whole_lines(count);
  }
  // SGD with a learning rate of -1 computes sum - (-1) x gradient x multiplier.
  append_group(std::move(parameters), {.rule = internal::Rule::kSgd, .lr = -1.0});
}

GradAccumulator::~GradAccumulator() = default;
GradAccumulator::GradAccumulator(GradAccumulator&&) noexcept = default;
GradAccumulator& GradAccumulator::operator=(GradAccumulator&&) noexcept = default;

const std::vector<Parameter>& GradAccumulator::summed() const { return impl_->summed; }

void GradAccumulator::apply(float multiplier, bool clear_grads) {
  impl_->begin();
  FusedOptimizer::apply(multiplier, clear_grads);
}

void GradAccumulator::set_grad(size_t index, const TensorView& grad) {
  impl_->check_sum(index, grad);
  FusedOptimizer::set_grad(index, grad);
}

// The weights of this optimizer are its sums, whatever the list says.
void GradAccumulator::rebind(std::vector<Parameter> changed) {
  for (size_t i = 0; i < std::min(changed.size(), parameters().size()); ++i) {
    impl_->check_sum(i, changed[i].grad);
    changed[i] = internal::gradient_only(std::move(changed[i]));
    changed[i].weight = parameters()[i].weight;
  }
  FusedOptimizer::rebind(std::move(changed));
}

void GradAccumulator::skipped(const std::string& culprit) {
  impl_->begin();
  impl_->bad = true;
  impl_->culprit = culprit;
}

// The sums are unscaled, so they are stepped by a scaler with a constant scale of 1.
StepReport GradAccumulator::step(Optimizer& optimizer, const StepOptions& options) {
  for (const Parameter& parameter : optimizer.parameters()) {
    const bool ours = parameter.grad.count == 0 || impl_->sums.contains(parameter.grad.data);
    internal::require(ours, ErrorCode::kInvalidArgument, [&] {
      return "The gradient of parameter '" + parameter.name +
             "' is not one of this accumulator's sums; make the optimizer on summed().";
    });
  }
  internal::require(
      impl_->added, ErrorCode::kWrongOrder,
      "step() was called before any gradient was added; step a scaler on the accumulator first.");
  if (!impl_->stepped) impl_->unit_scaler.scale(1.0f);
  StepOptions clearing = options;
  clearing.clear_grads = ClearGrads::kAlways;  // the next round begins with sums of zero
  StepReport report = impl_->bad ? internal::ScalerAccess::skip(impl_->unit_scaler, optimizer,
                                                                clearing, impl_->culprit)
                                 : impl_->unit_scaler.step(optimizer, clearing);
  impl_->stepped = true;
  return report;
}

}  // namespace headroom
