// Names of parameters, and the binding of torch's own optimizers.
#include "binding.h"

#include <headroom/error.h>
#include <headroom/measure.h>

#include <algorithm>
#include <sstream>

#include "core/element.h"

namespace headroom::libtorch::internal {

torch::Tensor WeakTensor::lock() const {
  auto impl = impl_.lock();
  return impl.defined() ? torch::Tensor(std::move(impl)) : torch::Tensor();
}

void Names::add(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    const WeakTensor parameter(item.value());
    names_.insert_or_assign(parameter.id(), std::make_pair(parameter, item.key()));
  }
  ++revision_;
}

std::string Names::of(const torch::Tensor& parameter, size_t group, size_t index) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  if (found != names_.end()) return found->second.second;
  std::ostringstream name;
  name << "param_groups[" << group << "].params[" << index << "] of size " << parameter.sizes();
  return name.str();
}

// Compares first, without allocating: in most steps nothing has changed.
void Binding::list(torch::optim::Optimizer& optimizer, const Names& names) {
  size_t at = 0;
  bool same = names_revision_ == names.revision();
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      same = same && at < weak_.size() && weak_[at].id() == parameter.unsafeGetTensorImpl();
      ++at;
    }
  }
  if (same && at == weak_.size()) return;
  weak_.clear();
  names_.clear();
  sorted_.clear();
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::vector<torch::Tensor>& params = optimizer.param_groups()[g].params();
    for (size_t i = 0; i < params.size(); ++i) {
      weak_.emplace_back(params[i]);
      names_.push_back(names.of(params[i], g, i));
      sorted_.push_back(params[i].unsafeGetTensorImpl());
    }
  }
  std::sort(sorted_.begin(), sorted_.end());
  if (std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end()) {
    weak_.clear();  // so that the next call builds the list again
    throw Error(ErrorCode::kInvalidArgument,
                "A parameter is listed twice in this optimizer; list it once.");
  }
  names_revision_ = names.revision();
}

bool Binding::shares_parameter(const Binding& other) const {
  std::vector<const c10::TensorImpl*> both;
  std::set_intersection(sorted_.begin(), sorted_.end(), other.sorted_.begin(), other.sorted_.end(),
                        std::back_inserter(both));
  return !both.empty();
}

void PlainBinding::bind(torch::optim::Optimizer& optimizer, const Names& names) {
  list(optimizer, names);
  torch_ = &optimizer;
}

// A parameter that no longer exists has no gradient.
void PlainBinding::refresh() {
  bool changed = !settled_ || parameters().size() != weak_.size();
  settled_ = false;
  for (size_t i = 0; i < weak_.size(); ++i) {
    changed |= gradients_.update(i, weak_[i].lock(), Gradients::Order::kAny, names_[i]);
    changed = changed || parameters()[i].name != names_[i];
  }
  if (changed) {
    std::vector<Parameter> now;
    now.reserve(weak_.size());
    // Without weights: torch's optimizer updates them.
    for (size_t i = 0; i < weak_.size(); ++i) now.push_back({names_[i], {}, gradients_.view(i)});
    rebind(std::move(now));
  }
  settled_ = true;
}

void PlainBinding::release() {
  torch_ = nullptr;
  Binding::release();
}

void PlainBinding::forget_gradients() {
  gradients_.clear();
  rebind({});
}

// Torch's optimizers read gradients that were unscaled in place, so an FP16 gradient must still fit
// in FP16 after unscaling with a scale below 1.
bool PlainBinding::overflows(float multiplier) const {
  std::vector<TensorView> halves;
  for (const Parameter& parameter : parameters()) {
    if (parameter.grad.dtype == DType::kF16) halves.push_back(parameter.grad);
  }
  return measure(halves).amax * static_cast<double>(multiplier) >=
         headroom::internal::kRoundsToInfF16;
}

void PlainBinding::apply(float multiplier, bool clear_grads) {
  std::vector<TensorView> grads;
  for (const Parameter& parameter : parameters()) grads.push_back(parameter.grad);
  const auto multiply = [&](float factor) {
    if (factor == 1.0f) return;
    headroom::unscale_(grads, factor);
    gradients_changed();
  };
  multiply(multiplier);
  try {
    torch_->step();
  } catch (...) {
    multiply(1.0f / multiplier);  // restore the scaled gradients, so that the step can be retried
    throw;
  }
  if (clear_grads) {
    zero_grad();
    gradients_changed();
  }
}

}  // namespace headroom::libtorch::internal
