#include "binding.h"

#include <headroom/error.h>
#include <headroom/measure.h>

#include <algorithm>
#include <sstream>

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
  if (found != names_.end() && found->second.first.lock().defined()) return found->second.second;
  std::ostringstream name;
  name << "param_groups[" << group << "].params[" << index << "] of size " << parameter.sizes();
  return name.str();
}

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
    weak_.clear();
    throw Error(ErrorCode::kInvalidArgument,
                "A parameter is listed twice in this optimizer; list each one once.");
  }
  names_revision_ = names.revision();
}

bool Binding::shares_parameter(const Binding& other) const {
  std::vector<const c10::TensorImpl*> both;
  std::set_intersection(sorted_.begin(), sorted_.end(), other.sorted_.begin(), other.sorted_.end(),
                        std::back_inserter(both));
  return std::any_of(both.begin(), both.end(), [&](const c10::TensorImpl* id) {
    const auto alive = [&](const WeakTensor& parameter) {
      return parameter.id() == id && parameter.lock().defined();
    };
    return std::any_of(other.weak_.begin(), other.weak_.end(), alive);
  });
}

headroom::Optimizer& PlainBinding::bind(torch::optim::Optimizer& optimizer, const Names& names) {
  list(optimizer, names);
  torch_ = &optimizer;
  refresh();
  return *this;
}

void PlainBinding::refresh() {
  gradients_.clear();
  std::vector<Parameter> list;
  list.reserve(weak_.size());
  for (size_t i = 0; i < weak_.size(); ++i) {
    const torch::Tensor parameter = weak_[i].lock();
    list.push_back({names_[i], {}, {}});
    if (parameter.defined()) {
      list.back().grad = gradients_.add(parameter, Gradients::Order::kAny, names_[i]);
    }
  }
  rebind(std::move(list));
}

void PlainBinding::release() {
  torch_ = nullptr;
  gradients_.clear();
  rebind({});
}

// torch's optimizers take gradients that are unscaled in place.
bool PlainBinding::overflows(float multiplier) const {
  std::vector<TensorView> halves;
  for (const Parameter& parameter : parameters()) {
    if (parameter.grad.dtype == DType::kF16) halves.push_back(parameter.grad);
  }
  constexpr double kRoundsToInf = 65520.0;
  return measure(halves).amax * static_cast<double>(multiplier) >= kRoundsToInf;
}

void PlainBinding::apply(float multiplier, bool clear_grads) {
  std::vector<TensorView> grads;
  for (const Parameter& parameter : parameters()) grads.push_back(parameter.grad);
  if (multiplier != 1.0f) {
    headroom::unscale_(grads, multiplier);
    grads_written();
  }
  try {
    torch_->step();
  } catch (...) {
    if (multiplier != 1.0f) {
      headroom::unscale_(grads, 1.0f / multiplier);
      grads_written();
    }
    throw;
  }
  if (clear_grads) {
    zero_grad();
    grads_written();
  }
}

}  // namespace headroom::libtorch::internal
