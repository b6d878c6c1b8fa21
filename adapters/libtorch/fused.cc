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

void FusedBody::bind(torch::optim::Optimizer& optimizer, const Names& names) {
  list(optimizer, names);
  check_same(optimizer);
  sync_groups(optimizer);
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

// Whether a weight is elsewhere, or has other strides, than when it was last shown.
bool FusedBody::weights_moved() {
  bool moved = false;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const torch::Tensor& tensor = tensors_[i];
    if (i == shown_.size()) {  // just added, and right
      shown_.push_back({Place(tensor), tensor.sizes().vec(), tensor.strides().vec(),
                        tensor.storage(), version_of(tensor)});
    }
    const Shown& shown = shown_[i];
    if (tensor.sizes() != torch::IntArrayRef(shown.sizes)) {
      throw Error(ErrorCode::kMismatch,
                  "The weight of " + names_[i] +
                      " has another shape than when the optimizer was made; make a new one.");
    }
    if (Place(tensor) == shown.place && tensor.strides() == torch::IntArrayRef(shown.strides)) {
      continue;
    }
    check_storage(tensor, "weight", names_[i]);
    moved = true;
  }
  return moved;
}

void FusedBody::refresh(bool with_gradients) {
  const bool moved = weights_moved();
  const std::vector<Parameter>& bound = fused().parameters();
  bool changed = moved;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (with_gradients) {
      changed |= gradients_.look(i, tensors_[i], Gradients::Order::kAsWeight, names_[i]);
    }
    changed = changed || bound[i].name != names_[i];
  }
  if (changed) {
    std::vector<Parameter> now;
    now.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      now.push_back({names_[i], view_of(tensors_[i], names_[i]), {}});
      if (with_gradients) now.back().grad = gradients_.view(i);
    }
    if (!with_gradients) gradients_.clear();
    reorder();
    fused().rebind(std::move(now));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    Shown& shown = shown_[i];
    if (version_of(tensors_[i]) != shown.version) {
      fused().follow_weight(i);
      shown.version = version_of(tensors_[i]);
    }
    if (!moved) continue;
    shown.place = Place(tensors_[i]);
    shown.strides = tensors_[i].strides().vec();
    shown.held = tensors_[i].storage();
  }
}

// Brings masters and moments into the order of weights whose strides have changed.
void FusedBody::reorder() {
  const torch::NoGradGuard no_grad;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> moves;  // to memory, from its new order
  for (const NamedTensor& named : fused().state().tensors) {
    const torch::Tensor& weight = tensors_[named.parameter];
    const Shown& before = shown_[named.parameter];
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
}

void FusedBody::forget_gradients() {
  gradients_.clear();
  std::vector<Parameter> parameters = fused().parameters();
  for (Parameter& parameter : parameters) parameter.grad = {};
  fused().rebind(std::move(parameters));
}

void FusedBody::masters_are_right() {
  for (size_t i = 0; i < shown_.size(); ++i) shown_[i].version = version_of(tensors_[i]);
}

void FusedBody::weights_written() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (fused().parameters()[i].grad.data == nullptr) continue;
    tensors_[i].unsafeGetTensorImpl()->bump_version();
  }
  masters_are_right();
}

FusedState FusedBody::state() {
  const OptimizerState core_state = fused().state();
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
  OptimizerState core_state = fused().state();
  core_state.steps = state.steps;
  std::vector<torch::Tensor> held;  // in the order of the core's memory
  for (size_t i = 0; i < mine.size(); ++i) {
    held.push_back(torch::empty_like(mine[i].tensor).copy_(state.tensors[i].tensor));
    core_state.tensors[i].tensor.data = held.back().data_ptr();
  }
  fused().load_state(core_state);
  for (const torch::Tensor& parameter : tensors_) parameter.unsafeGetTensorImpl()->bump_version();
  masters_are_right();
}

}  // namespace internal

FusedOptimizer::FusedOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                               std::shared_ptr<internal::FusedBody> body)
    : torch::optim::Optimizer(std::move(groups), std::move(defaults)), body_(std::move(body)) {
  bound(false);
}

FusedOptimizer::~FusedOptimizer() = default;

// The body with groups, weights and, if asked for, gradients as they are now.
internal::FusedBody& FusedOptimizer::bound(bool with_gradients) {
  const internal::TorchStream stream;
  body_->bind(*this, {});
  body_->refresh(with_gradients);
  return *body_;
}

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const torch::AutoGradMode with_grad(true);
    loss = closure();
  }
  const internal::TorchStream stream;
  bound(true).fused().apply(1.0f, false);
  body_->weights_written();
  body_->release();
  return loss;
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const internal::TorchStream stream;
  body_->refresh(false);
  body_->save(*this, archive);
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) {
  const internal::TorchStream stream;
  bound(false).load(*this, archive);
}

std::vector<torch::Tensor> FusedOptimizer::master_params() {
  const internal::TorchStream stream;
  bound(false);
  std::vector<torch::Tensor> masters;
  for (const auto& group : param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      const float* const master = body_->fused().master(masters.size());
      if (master == nullptr) {
        masters.push_back(parameter.detach());
        continue;
      }
      masters.push_back(
          torch::from_blob(const_cast<float*>(master), parameter.sizes(), parameter.strides(),
                           parameter.options().dtype(torch::kFloat).requires_grad(false)));
    }
  }
  return masters;
}

FusedState FusedOptimizer::fused_state() {
  const internal::TorchStream stream;
  return bound(false).state();
}

void FusedOptimizer::load_fused_state(const FusedState& state) {
  const internal::TorchStream stream;
  bound(false).load_state(state);
}

void FusedOptimizer::refresh_masters() {
  const internal::TorchStream stream;
  bound(false).fused().refresh_masters();
}

int64_t FusedOptimizer::steps(size_t index) const { return body_->fused().steps(index); }

}  // namespace headroom::libtorch
