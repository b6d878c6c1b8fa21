#include "fused.h"

#include <headroom/error.h>

#include <utility>

namespace headroom::libtorch {
namespace internal {
namespace {

int64_t version_of(const torch::Tensor& tensor) {
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

}  // namespace

headroom::Optimizer& FusedBody::bind(torch::optim::Optimizer& optimizer, const Names& names) {
  list(optimizer, names);
  check_same(optimizer);
  sync_groups(optimizer);
  refresh();
  return core();
}

// Parameters that are known have to be the first ones of the groups, in the same order.
void FusedBody::check_same(const torch::optim::Optimizer& optimizer) const {
  size_t at = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      if (at < tensors_.size() && !tensors_[at].is_same(parameter)) {
        throw Error(ErrorCode::kUnsupported,
                    "The parameters of a group were changed after the optimizer was used; add new "
                    "ones as a new group, or make a new optimizer.");
      }
      ++at;
    }
  }
}

std::vector<Parameter> FusedBody::new_parameters(const std::vector<torch::Tensor>& params) {
  std::vector<Parameter> added;
  for (const torch::Tensor& parameter : params) {
    const std::string& name = names_[tensors_.size() + added.size()];
    if (!is_dense(parameter)) {
      throw Error(ErrorCode::kUnsupported, "The weight of " + name +
                                               " is not dense in memory; make the parameter from a "
                                               "contiguous tensor.");
    }
    if (parameter.is_complex()) {
      throw Error(ErrorCode::kUnsupported,
                  "The weight of " + name + " is complex; use torch's optimizers for it.");
    }
    check_storage(parameter, "weight", name);
    added.push_back({name, view_of(parameter, "The weight of " + name), {}});
  }
  return added;
}

std::vector<Parameter> FusedBody::memory(bool with_gradients) {
  gradients_.clear();
  std::vector<Parameter> parameters;
  parameters.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    parameters.push_back({names_[i], view_of(tensors_[i], names_[i]), {}});
    if (with_gradients) {
      parameters.back().grad = gradients_.add(tensors_[i], Gradients::Order::kAsWeight, names_[i]);
    }
  }
  return parameters;
}

void FusedBody::refresh() {
  for (size_t i = versions_.size(); i < core().parameters().size(); ++i) {
    versions_.push_back(version_of(tensors_[i]));
  }
  show(true);
}

void FusedBody::follow() { show(false); }

// Shows the core the memory as it is; masters follow weights that somebody has written to.
void FusedBody::show(bool with_gradients) {
  for (size_t i = 0; i < tensors_.size(); ++i) check_storage(tensors_[i], "weight", names_[i]);
  std::vector<Parameter> now = memory(with_gradients);
  reorder();
  core().rebind(std::move(now));
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (version_of(tensors_[i]) == versions_[i]) continue;
    core().follow_weight(i);
    versions_[i] = version_of(tensors_[i]);
  }
  // As long as the memory is held, no other weight can come to its address unseen.
  held_.clear();
  for (const torch::Tensor& tensor : tensors_) {
    if (tensor.scalar_type() != torch::kFloat) held_.push_back(tensor.storage());
  }
}

// Brings masters and moments into the order of weights whose strides have changed.
void FusedBody::reorder() {
  const torch::NoGradGuard no_grad;
  for (size_t i = layouts_.size(); i < tensors_.size(); ++i) {  // just added
    layouts_.push_back({tensors_[i].sizes().vec(), tensors_[i].strides().vec()});
  }
  bool same = true;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].sizes() != torch::IntArrayRef(layouts_[i].sizes)) {
      throw Error(ErrorCode::kMismatch,
                  "The weight of " + names_[i] +
                      " has another shape than when the optimizer was made; make a new one.");
    }
    same = same && tensors_[i].strides() == torch::IntArrayRef(layouts_[i].strides);
  }
  if (same) return;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> moves;  // to memory, from its new order
  for (const NamedTensor& named : core().state().tensors) {
    const torch::Tensor& weight = tensors_[named.parameter];
    const Layout& before = layouts_[named.parameter];
    if (weight.strides() == torch::IntArrayRef(before.strides) || weight.numel() == 0) continue;
    const auto options = weight.options().dtype(torch::kFloat).requires_grad(false);
    const auto memory = [&](torch::IntArrayRef sizes, torch::IntArrayRef strides) {
      return torch::from_blob(named.tensor.data, sizes, strides, options);
    };
    moves.emplace_back(memory(weight.sizes(), weight.strides()),
                       torch::empty_strided(weight.sizes(), weight.strides(), options)
                           .copy_(memory(before.sizes, before.strides)));
  }
  for (const auto& [to, from] : moves) to.copy_(from);  // nothing can fail any more
  for (size_t i = 0; i < tensors_.size(); ++i) layouts_[i].strides = tensors_[i].strides().vec();
}

// The weights stay as they were last shown.
void FusedBody::release() {
  gradients_.clear();
  std::vector<Parameter> parameters = core().parameters();
  for (Parameter& parameter : parameters) parameter.grad = {};
  core().rebind(std::move(parameters));
}

void FusedBody::masters_are_right() {
  for (size_t i = 0; i < tensors_.size(); ++i) versions_[i] = version_of(tensors_[i]);
}

void FusedBody::weights_written() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (core().parameters()[i].grad.data == nullptr) continue;
    tensors_[i].unsafeGetTensorImpl()->bump_version();
  }
  masters_are_right();
}

FusedState FusedBody::state() {
  const OptimizerState core_state = core().state();
  FusedState state;
  state.steps = core_state.steps;
  for (const NamedTensor& named : core_state.tensors) {
    const torch::Tensor& like = tensors_[named.parameter];
    state.tensors.push_back(
        {named.parameter, named.name.substr(named.name.rfind('/') + 1),
         torch::from_blob(named.tensor.data, like.sizes(), like.strides(),
                          like.options().dtype(torch::kFloat).requires_grad(false))});
  }
  return state;
}

void FusedBody::load_state(const FusedState& state) {
  const torch::NoGradGuard no_grad;
  const std::vector<StateTensor> mine = this->state().tensors;
  bool same = mine.size() == state.tensors.size();
  for (size_t i = 0; same && i < mine.size(); ++i) {
    const StateTensor& theirs = state.tensors[i];
    same = mine[i].parameter == theirs.parameter && mine[i].name == theirs.name;
    if (same && (!theirs.tensor.defined() || mine[i].tensor.sizes() != theirs.tensor.sizes())) {
      throw Error(ErrorCode::kBadState, "The saved state of " + names_[theirs.parameter] +
                                            " has another size; it belongs to another model.");
    }
  }
  if (!same) {
    throw Error(ErrorCode::kBadState,
                "The saved state has other tensors than this optimizer; it belongs to another "
                "model, optimizer or precision.");
  }
  OptimizerState core_state = core().state();
  core_state.steps = state.steps;
  std::vector<torch::Tensor> held;  // in the order of the core's memory
  for (size_t i = 0; i < mine.size(); ++i) {
    held.push_back(torch::empty_like(mine[i].tensor).copy_(state.tensors[i].tensor));
    core_state.tensors[i].tensor.data = held.back().data_ptr();
  }
  core().load_state(core_state);
  for (const torch::Tensor& parameter : tensors_) parameter.unsafeGetTensorImpl()->bump_version();
  masters_are_right();
}

}  // namespace internal

FusedOptimizer::FusedOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                               std::shared_ptr<internal::FusedBody> body)
    : torch::optim::Optimizer(std::move(groups), std::move(defaults)), body_(std::move(body)) {
  const internal::TorchStream stream;
  body_->bind(*this, {});
  body_->release();
}

FusedOptimizer::~FusedOptimizer() = default;

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const torch::AutoGradMode with_grad(true);
    loss = closure();
  }
  const internal::TorchStream stream;
  headroom::Optimizer& core = body_->bind(*this, {});
  core.apply(1.0f, false);
  body_->weights_written();
  body_->release();
  return loss;
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const internal::TorchStream stream;
  body_->follow();
  body_->save(*this, archive);
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) {
  const internal::TorchStream stream;
  body_->load(*this, archive);
}

std::vector<torch::Tensor> FusedOptimizer::master_params() {
  const internal::TorchStream stream;
  body_->bind(*this, {});
  std::vector<torch::Tensor> masters;
  for (const auto& group : param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      const float* const master = body_->core().master(masters.size());
      if (master == nullptr) {
        masters.push_back(parameter.detach());
        continue;
      }
      masters.push_back(
          torch::from_blob(const_cast<float*>(master), parameter.sizes(), parameter.strides(),
                           parameter.options().dtype(torch::kFloat).requires_grad(false)));
    }
  }
  body_->release();
  return masters;
}

FusedState FusedOptimizer::fused_state() {
  const internal::TorchStream stream;
  body_->bind(*this, {});
  body_->release();
  return body_->state();
}

void FusedOptimizer::load_fused_state(const FusedState& state) {
  const internal::TorchStream stream;
  body_->bind(*this, {});
  body_->release();
  body_->load_state(state);
}

void FusedOptimizer::refresh_masters() {
  const internal::TorchStream stream;
  body_->bind(*this, {});
  body_->core().refresh_masters();
  body_->release();
}

int64_t FusedOptimizer::steps(size_t index) const { return body_->core().steps(index); }

}  // namespace headroom::libtorch
