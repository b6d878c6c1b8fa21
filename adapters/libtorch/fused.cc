// FusedBody, and the methods of FusedOptimizer that forward to it.
#include "fused.h"

#include <headroom/error.h>

#include <utility>

namespace headroom::libtorch {
namespace internal {
namespace {

// Torch's counter of in-place writes to a tensor.
int64_t version_of(const torch::Tensor& tensor) {
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

// A tensor over an FP32 state tensor of the core, on the device of `weight`. The core owns the
// memory.
torch::Tensor state_memory(const NamedTensor& state, const torch::Tensor& weight,
                           torch::IntArrayRef strides) {
  return torch::from_blob(state.tensor.data, weight.sizes(), strides,
                          weight.options().dtype(torch::kFloat).requires_grad(false));
}

// A copy, on the device of the weight, of state that the core has decoded in host memory.
torch::Tensor state_copy(const NamedTensor& state, const torch::Tensor& weight) {
  const torch::TensorOptions options = torch::TensorOptions().dtype(torch::kFloat);
  const torch::Tensor decoded =
      torch::from_blob(state.tensor.data, weight.sizes(), weight.strides(), options);
  return torch::empty_like(weight, options.device(weight.device())).copy_(decoded);
}

}  // namespace

void FusedBody::bind(torch::optim::Optimizer& optimizer, const Names& names) {
  list(optimizer, names);
  check_same_parameters();
  sync_groups(optimizer);
}

// The parameters bound earlier must be the first ones of the groups, in the same order.
void FusedBody::check_same_parameters() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (i < weak_.size() && weak_[i].id() == tensors_[i].unsafeGetTensorImpl()) continue;
    unsupported(
        "The parameters of a group were changed after the optimizer was used; add parameters as a "
        "new group, or create a new optimizer.");
  }
}

std::vector<Parameter> FusedBody::new_parameters(const std::vector<torch::Tensor>& params) {
  std::vector<Parameter> added;
  for (const torch::Tensor& parameter : params) {
    const std::string& name = names_[tensors_.size() + added.size()];
    if (!is_dense(parameter)) {
      unsupported("The weight of " + name +
                  " is not dense in memory; create the parameter from a contiguous tensor.");
    }
    if (parameter.is_complex()) {
      unsupported("The weight of " + name + " is complex; use torch's optimizers for it.");
    }
    check_storage(parameter, "weight", name);
    added.push_back({name, view_of(parameter, "The weight of " + name), {}});
  }
  return added;
}

// Whether the memory or the strides of any weight have changed since the core's view was made.
bool FusedBody::weights_moved() {
  bool moved = false;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const torch::Tensor& tensor = tensors_[i];
    if (i == bound_.size()) {  // of a new group: the core's view and master are up to date
      bound_.push_back({Place(tensor), tensor.sizes().vec(), tensor.strides().vec(),
                        tensor.storage(), version_of(tensor)});
    }
    const BoundWeight& bound = bound_[i];
    if (tensor.sizes() != torch::IntArrayRef(bound.sizes)) {
      throw Error(
          ErrorCode::kMismatch,
          "The weight of " + names_[i] +
              " has another shape than when the optimizer was created; create a new optimizer.");
    }
    if (Place(tensor) == bound.place && tensor.strides() == torch::IntArrayRef(bound.strides)) {
      continue;
    }
    check_storage(tensor, "weight", names_[i]);
    moved = true;
  }
  return moved;
}

// reorder_state() comes before rebind(), which compares the new views with the core's state. If
// rebind() throws, bound_ has the new strides but the earlier places, so that the next call neither
// reorders again nor takes the core's views for current.
void FusedBody::refresh(bool with_gradients) {
  const bool moved = weights_moved();
  const std::vector<Parameter>& before = fused().parameters();
  bool changed = moved || !settled_;
  settled_ = false;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (with_gradients) {
      changed |= gradients_.update(i, tensors_[i], Gradients::Order::kAsWeight, names_[i]);
    }
    changed = changed || before[i].name != names_[i];
  }
  if (changed) {
    std::vector<Parameter> now;
    now.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      now.push_back({names_[i], view_of(tensors_[i], names_[i]), {}});
      if (with_gradients) now.back().grad = gradients_.view(i);
    }
    if (!with_gradients) gradients_.clear();
    reorder_state();
    fused().rebind(std::move(now));
  }
  settled_ = true;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    BoundWeight& weight = bound_[i];
    // Others have written to the weight. Before anything but a step, writes through data(), which
    // the version does not show, are looked for as well; a step looks for them itself.
    if (version_of(tensors_[i]) != weight.version || !with_gradients) {
      fused().follow_weight(i);
      weight.version = version_of(tensors_[i]);
    }
    if (!moved) continue;
    weight.place = Place(tensors_[i]);
    weight.storage = tensors_[i].storage();
  }
  if (with_gradients) fused().allocate();  // a step follows; if this throws, it has not begun
}

// Permutes masters and moments of weights whose strides have changed, because the core stores them
// in the weight's element order. Copies are made first, so that an exception changes nothing.
void FusedBody::reorder_state() {
  const torch::NoGradGuard no_grad;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> moves;  // the core's memory, new values
  const OptimizerState state = fused().state();
  for (const NamedTensor& named : state.tensors) {
    const torch::Tensor& weight = tensors_[named.parameter];
    const BoundWeight& before = bound_[named.parameter];
    if (weight.strides() == torch::IntArrayRef(before.strides) || weight.numel() == 0) continue;
    if (state.copies != nullptr) {
      unsupported("The memory format of " + names_[named.parameter] +
                  " has changed, which compact state (Precision::state) cannot follow; save the "
                  "optimizer, and load it into a new one.");
    }
    const torch::Tensor to = state_memory(named, weight, weight.strides());
    moves.emplace_back(to,
                       torch::empty_like(to).copy_(state_memory(named, weight, before.strides)));
  }
  for (const auto& [to, from] : moves) to.copy_(from);
  for (size_t i = 0; i < tensors_.size(); ++i) bound_[i].strides = tensors_[i].strides().vec();
}

void FusedBody::forget_gradients() {
  gradients_.clear();
  std::vector<Parameter> parameters = fused().parameters();
  for (Parameter& parameter : parameters) parameter.grad = {};
  fused().rebind(std::move(parameters));
}

void FusedBody::mark_masters_current() {
  for (size_t i = 0; i < bound_.size(); ++i) bound_[i].version = version_of(tensors_[i]);
}

// Increments torch's version counter of every updated weight, as torch's own optimizers do.
void FusedBody::weights_written() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (fused().parameters()[i].grad.data == nullptr) continue;
    tensors_[i].unsafeGetTensorImpl()->bump_version();
  }
  mark_masters_current();
}

FusedState FusedBody::state() {
  const OptimizerState core_state = fused().state();
  FusedState state;
  state.steps = core_state.steps;
  state.format = core_state.format;
  for (const NamedTensor& named : core_state.tensors) {
    const torch::Tensor& like = tensors_[named.parameter];
    // "embed.weight/exp_avg" becomes "exp_avg": parameters are known by index here.
    state.tensors.push_back({named.parameter, named.name.substr(named.name.rfind('/') + 1),
                             core_state.copies == nullptr
                                 ? state_memory(named, like, like.strides())
                                 : state_copy(named, like)});
  }
  return state;
}

// Checks names and sizes; the core checks step counts and values, and writes masters to the
// weights.
void FusedBody::load_state(const FusedState& state) {
  const torch::NoGradGuard no_grad;
  fused().allocate();
  const std::vector<StateTensor> present = this->state().tensors;
  bool same = present.size() == state.tensors.size();
  for (size_t i = 0; same && i < present.size(); ++i) {
    const StateTensor& saved = state.tensors[i];
    same = present[i].parameter == saved.parameter && present[i].name == saved.name;
    if (same && (!saved.tensor.defined() || present[i].tensor.sizes() != saved.tensor.sizes())) {
      throw Error(ErrorCode::kBadState, "The saved state of " + names_[saved.parameter] +
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
  core_state.format = state.format;
  std::vector<torch::Tensor> held;  // copies in the core's element order
  for (size_t i = 0; i < present.size(); ++i) {
    held.push_back(torch::empty_like(present[i].tensor).copy_(state.tensors[i].tensor));
    TensorView& view = core_state.tensors[i].tensor;
    view.data = held.back().data_ptr();
    view.device = core_device(held.back().device(), current_cuda_device());
  }
  fused().load_state(core_state);
  for (const torch::Tensor& parameter : tensors_) parameter.unsafeGetTensorImpl()->bump_version();
  mark_masters_current();
}

}  // namespace internal

FusedOptimizer::FusedOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                               std::shared_ptr<internal::FusedBody> body)
    : torch::optim::Optimizer(std::move(groups), std::move(defaults)), body_(std::move(body)) {
  bind(false);
}

FusedOptimizer::~FusedOptimizer() = default;

internal::BoundBody FusedOptimizer::bind(bool with_gradients) {
  return {*body_, *this, with_gradients};
}

// Without a scaler: gradients are used as they are, and inf and nan reach the weights, as in torch.
torch::Tensor FusedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const torch::AutoGradMode with_grad(true);
    loss = closure();
  }
  internal::BoundBody body = bind(true);
  body->fused().apply(1.0f, false);
  body->weights_written();
  body->release();
  return loss;
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  // Groups may have been added since the last step.
  const_cast<FusedOptimizer*>(this)->bind(false)->save(*this, archive);
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) {
  bind(false)->load(*this, archive);
}

std::vector<torch::Tensor> FusedOptimizer::master_params() {
  std::vector<torch::Tensor> masters;
  for (const auto& group : param_groups()) {
    for (const torch::Tensor& parameter : group.params()) masters.push_back(parameter.detach());
  }
  for (const StateTensor& item : fused_state().tensors) {
    if (item.name == "master") masters[item.parameter] = item.tensor;
  }
  return masters;
}

FusedState FusedOptimizer::fused_state() {
  internal::BoundBody body = bind(false);
  body->fused().allocate();
  return body->state();
}

void FusedOptimizer::load_fused_state(const FusedState& state) { bind(false)->load_state(state); }

void FusedOptimizer::refresh_masters() { bind(false)->fused().refresh_masters(); }

int64_t FusedOptimizer::steps(size_t index) const {
  return const_cast<FusedOptimizer*>(this)->bind(false)->fused().steps(index);
}

}  // namespace headroom::libtorch
