#include <headroom/error.h>
#include <headroom/libtorch/grad_scaler.h>
#include <headroom/libtorch/optim.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "binding.h"
#include "fused.h"
#include "state_dict.h"

namespace headroom::libtorch {
namespace internal {

/// The bindings of all optimizers a scaler has seen, and what it remembers beside the core.
class Bridges {
 public:
  Names names;

  /// Losses whose backward ran. Shared with the hooks on them.
  std::shared_ptr<int64_t> backwards = std::make_shared<int64_t>(0);

  /// Whether gradients wait that no step or unscale_ has used.
  bool waiting() const { return *backwards != used_; }

  /// Whether a backward ran after the step of this round, maybe of a loss that was scaled before.
  bool came_late() const {
    return std::any_of(entries_.begin(), entries_.end(), [this](const auto& entry) {
      return entry.second.round == round_ && entry.second.used != *backwards;
    });
  }

  /// The gradients of this optimizer are stepped or unscaled, or those of all are dropped.
  void used(const torch::optim::Optimizer& optimizer, bool stepped) {
    Entry& entry = entries_[&optimizer];
    entry.used = *backwards;
    entry.stepped = stepped;
    used_ = *backwards;
  }
  void discard() {
    for (auto& [optimizer, entry] : entries_) entry.used = *backwards;
    used_ = *backwards;
  }

  /// What a scaler on a CUDA device multiplies there.
  torch::Tensor one;

  Binding& of(torch::optim::Optimizer& optimizer) {
    Entry& entry = entries_[&optimizer];
    auto* const fused = dynamic_cast<FusedOptimizer*>(&optimizer);
    if (fused != nullptr) {
      entry.plain = nullptr;
      entry.fused = fused->body_;
      return *fused->body_;
    }
    if (entry.plain == nullptr) entry.plain = std::make_shared<PlainBinding>();
    return *entry.plain;
  }

  /// A parameter may be in one optimizer only in each round. Optimizers of earlier rounds that had
  /// it may be long gone; they are forgotten.
  void enter(const torch::optim::Optimizer& optimizer, const Binding& binding) {
    for (auto other = entries_.begin(); other != entries_.end();) {
      const std::shared_ptr<Binding> theirs = other->second.alive();
      const bool gone = theirs == nullptr;
      const bool shared = !gone && theirs.get() != &binding && theirs->shares_parameter(binding);
      if (shared && other->second.round == round_) {
        throw Error(
            ErrorCode::kInvalidArgument,
            "A parameter of this optimizer belongs to another optimizer that was used since "
            "the last update() too; give each parameter to one optimizer only.");
      }
      other = gone || shared ? entries_.erase(other) : std::next(other);
    }
    entries_[&optimizer].round = round_;
  }

  void next_round() { ++round_; }

  /// Calls `action` while the core sees all gradients that may wait as they are now. Those of an
  /// optimizer that was stepped in this round do not, unless another backward came after it.
  void with_all(const std::function<void()>& action) {
    const TorchStream stream;
    std::vector<std::shared_ptr<Binding>> bound;
    for (auto& [optimizer, entry] : entries_) {
      if (entry.round == round_ && entry.stepped && entry.used == *backwards) continue;
      if (auto binding = entry.alive()) bound.push_back(std::move(binding));
    }
    const auto release = [&] {
      for (const auto& binding : bound) {
        binding->grads_written();
        binding->release();
      }
    };
    try {
      for (const auto& binding : bound) binding->refresh();
      action();
    } catch (...) {
      release();
      throw;
    }
    release();
  }

 private:
  struct Entry {
    std::shared_ptr<PlainBinding> plain;  // of a torch optimizer, whose death goes unseen
    std::weak_ptr<FusedBody> fused;
    int64_t round = -1;
    int64_t used = -1;     // backwards when its gradients were last used,
    bool stepped = false;  // by a step

    std::shared_ptr<Binding> alive() const {
      if (plain != nullptr) return plain;
      return fused.lock();
    }
  };
  std::map<const torch::optim::Optimizer*, Entry> entries_;
  int64_t round_ = 0;
  int64_t used_ = 0;  // backwards when any were
};

namespace {

/// Binds for one call of the core, and releases at its end.
class Bound {
 public:
  Bound(torch::optim::Optimizer& optimizer, Bridges& bridges)
      : binding_(bridges.of(optimizer)), core_(binding_.bind(optimizer, bridges.names)) {
    try {
      bridges.enter(optimizer, binding_);
    } catch (...) {
      binding_.release();
      throw;
    }
  }
  ~Bound() { binding_.release(); }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  Binding* operator->() { return &binding_; }
  headroom::Optimizer& core() { return core_; }

 private:
  TorchStream stream_;
  Binding& binding_;
  headroom::Optimizer& core_;
};

bool has_gradient(const headroom::Optimizer& optimizer) {
  for (const Parameter& parameter : optimizer.parameters()) {
    if (parameter.grad.data != nullptr) return true;
  }
  return false;
}

float checked_scale(double scale) {
  const auto narrow = static_cast<float>(scale);
  if (std::isnan(scale) || static_cast<double>(narrow) != scale) {
    throw Error(ErrorCode::kInvalidArgument,
                "A scale of " + std::to_string(scale) + " cannot be set; FP32 does not have it.");
  }
  return narrow;
}

int32_t checked_count(int64_t value, const char* what) {
  if (value < 1 || value > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, std::string(what) + " is " + std::to_string(value) +
                                                 "; it has to be from 1 to 2147483647.");
  }
  return static_cast<int32_t>(value);
}

}  // namespace
}  // namespace internal

using internal::Bound;

namespace {

std::unique_ptr<headroom::GradScaler> make_core(const ScalePolicy& policy, ScalerOptions options) {
  const internal::TorchStream stream;
  return std::make_unique<headroom::GradScaler>(policy, std::move(options));
}

}  // namespace

GradScalerOptions& GradScalerOptions::init_scale(double scale) {
  policy_.init_scale = static_cast<float>(scale);
  return *this;
}
GradScalerOptions& GradScalerOptions::growth_factor(double factor) {
  policy_.growth_factor = factor;
  return *this;
}
GradScalerOptions& GradScalerOptions::backoff_factor(double factor) {
  policy_.backoff_factor = factor;
  return *this;
}
GradScalerOptions& GradScalerOptions::growth_interval(int64_t steps) {
  policy_.growth_interval = internal::checked_count(steps, "growth_interval");
  return *this;
}
GradScalerOptions& GradScalerOptions::enabled(bool enabled) {
  scaler_.enabled = enabled;
  return *this;
}
GradScalerOptions& GradScalerOptions::device(const torch::Device& device) {
  scaler_.device = internal::core_device(device, internal::current_cuda_device());
  return *this;
}
GradScalerOptions& GradScalerOptions::min_scale(double scale) {
  policy_.min_scale = static_cast<float>(scale);
  return *this;
}
GradScalerOptions& GradScalerOptions::max_scale(double scale) {
  policy_.max_scale = static_cast<float>(scale);
  return *this;
}
GradScalerOptions& GradScalerOptions::hysteresis(int64_t overflows) {
  policy_.hysteresis = internal::checked_count(overflows, "hysteresis");
  return *this;
}
GradScalerOptions& GradScalerOptions::max_skips_in_row(int64_t steps) {
  policy_.max_skips_in_row = steps;
  return *this;
}
GradScalerOptions& GradScalerOptions::on_overflow(OnOverflow reaction) {
  policy_.on_overflow = reaction;
  return *this;
}
GradScalerOptions& GradScalerOptions::ranks(std::shared_ptr<Ranks> ranks, RankGradients gradients) {
  scaler_.ranks = std::move(ranks);
  scaler_.gradients = gradients;
  return *this;
}
GradScalerOptions& GradScalerOptions::on_alarm(std::function<void(const AlarmReport&)> callback) {
  scaler_.on_alarm = std::move(callback);
  return *this;
}

GradScaler::GradScaler(GradScalerOptions options)
    : on_device_(options.scaler_.device.type == DeviceType::kCUDA),
      alone_(options.scaler_.ranks == nullptr),
      core_(make_core(options.policy_, std::move(options.scaler_))),
      bridges_(std::make_unique<internal::Bridges>()) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

torch::Tensor GradScaler::scale(const torch::Tensor& loss) {
  if (!is_enabled()) return loss;
  if (!loss.defined() || !loss.is_floating_point()) {
    throw Error(ErrorCode::kInvalidArgument,
                "scale() got a tensor that is undefined or not of a floating-point type; pass the "
                "loss.");
  }
  const torch::Tensor wide = loss.element_size() < 4 ? loss.to(torch::kFloat) : loss;
  const torch::Tensor scaled =
      on_device_ ? wide * scale_on_device(loss) : wide * static_cast<double>(core_->scale(1.0f));
  if (scaled.requires_grad()) {
    scaled.register_hook([backwards = bridges_->backwards](const torch::Tensor&) { ++*backwards; });
  }
  return scaled;
}

// The present scale as a tensor of its own, which later updates leave alone.
torch::Tensor GradScaler::scale_on_device(const torch::Tensor& loss) {
  const internal::TorchStream stream;
  if (!bridges_->one.defined()) {
    bridges_->one = torch::ones({}, loss.options().dtype(torch::kFloat).requires_grad(false));
  }
  const torch::Tensor factor = torch::empty_like(bridges_->one);
  core_->scale(internal::view_of(bridges_->one, "The loss"),
               internal::view_of(factor, "The scaled loss"));
  return factor;
}

std::vector<torch::Tensor> GradScaler::scale(const std::vector<torch::Tensor>& losses) {
  std::vector<torch::Tensor> scaled;
  for (const torch::Tensor& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

UnscaleResult GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return {};
  Bound bound(optimizer, *bridges_);
  const UnscaleResult result = core_->unscale_(bound.core());
  bound->grads_written();
  bridges_->used(optimizer, false);
  return result;
}

StepReport GradScaler::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  Bound bound(optimizer, *bridges_);
  if (!is_enabled() && alone_ && !internal::has_gradient(bound.core())) {
    optimizer.step();  // as in PyTorch, whatever that does
    StepReport report;
    report.applied = true;
    return report;
  }
  StepReport report;
  const bool clears = options.clear_grads == ClearGrads::kAlways;
  try {
    report = core_->step(bound.core(), options);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOverflow) {
      bound->grads_written();  // zeroed
      bridges_->used(optimizer, true);
    }
    throw;
  }
  if (report.applied || report.pending) bound->weights_written();
  if (clears || !report.applied) bound->grads_written();
  bridges_->used(optimizer, true);
  return report;
}

StepReport GradScaler::step(torch::optim::Optimizer& optimizer,
                            const torch::optim::Optimizer::LossClosure& closure,
                            const StepOptions& options) {
  if (closure == nullptr) return step(optimizer, options);
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    if (!is_enabled()) {
      optimizer.step(closure);
      StepReport report;
      report.applied = true;
      return report;
    }
    throw Error(ErrorCode::kUnsupported,
                "LBFGS calls its closure many times in one step and moves the weights in between; "
                "that cannot be skipped as a whole. Use it without a scaler, in FP32 or BF16.");
  }
  {
    const torch::AutoGradMode with_grad(true);
    closure();
  }
  return step(optimizer, options);
}

void GradScaler::update() {
  if (!is_enabled()) return;
  const int64_t rounds = core_->rounds();
  try {
    if (bridges_->came_late()) core_->more_gradients();
    bridges_->with_all([&] { core_->update(); });
  } catch (...) {
    if (core_->rounds() != rounds) bridges_->next_round();  // an alarm, after the update
    throw;
  }
  bridges_->next_round();
}

void GradScaler::check_no_waiting() const {
  if (!bridges_->waiting()) return;
  throw Error(ErrorCode::kWrongOrder,
              "The scale was set by hand while gradients wait that were made with the old one; "
              "step first, or drop them and call discard().");
}

// Takes another scale, once it is sure that no gradients wait.
void GradScaler::take_state(const ScaleState& state) {
  check_no_waiting();
  core_->assume_known();  // other losses have had no backward
  bridges_->with_all([&] { core_->load_state(state); });
  bridges_->next_round();
}

StateDict GradScaler::state_dict() const {
  if (!is_enabled()) return {};
  save();  // throws in the middle of a round
  return internal::to_state_dict({policy(), state()});
}

void GradScaler::load_state_dict(const StateDict& saved) {
  if (!is_enabled()) return;
  check_no_waiting();
  const internal::PolicyAndState next = internal::with_state_dict({policy(), state()}, saved);
  const ScalePolicy before = policy();
  core_->set_policy(next.policy);
  try {
    take_state(next.state);
  } catch (...) {
    core_->set_policy(before);
    throw;
  }
}

void GradScaler::update(double new_scale) {
  if (!is_enabled()) return;
  const float scale = internal::checked_scale(new_scale);
  if (!allows(policy(), scale)) {
    throw Error(ErrorCode::kInvalidArgument,
                "A scale of " + std::to_string(new_scale) + " cannot be set; the policy allows " +
                    std::to_string(policy().min_scale) + " to " +
                    std::to_string(policy().max_scale) +
                    (policy().grad_limit > 0.0f ? ", powers of two." : "."));
  }
  ScaleState state = core_->state();
  state.scale = scale;
  state.pending = scale;
  take_state(state);
}

void GradScaler::update(const torch::Tensor& new_scale) {
  if (!is_enabled()) return;
  if (!new_scale.defined() || new_scale.numel() != 1 || new_scale.requires_grad()) {
    throw Error(ErrorCode::kInvalidArgument,
                "update(new_scale) takes a tensor with one element that needs no gradient.");
  }
  update(new_scale.item<double>());
}

void GradScaler::discard() {
  bridges_->discard();
  core_->discard();
}

StepReport GradScaler::report() const {
  const internal::TorchStream stream;
  return core_->report();
}
std::optional<StepReport> GradScaler::try_report() const {
  const internal::TorchStream stream;
  return core_->try_report();
}

bool GradScaler::run_again() const {
  const internal::TorchStream stream;
  return core_->run_again();
}

double GradScaler::get_scale() const {
  const internal::TorchStream stream;
  return core_->get_scale();
}
double GradScaler::get_growth_factor() const { return policy().growth_factor; }
double GradScaler::get_backoff_factor() const { return policy().backoff_factor; }
int64_t GradScaler::get_growth_interval() const { return policy().growth_interval; }
bool GradScaler::is_enabled() const { return core_->enabled(); }

void GradScaler::change(const std::function<void(ScalePolicy&)>& change) {
  ScalePolicy policy = core_->policy();
  change(policy);
  const internal::TorchStream stream;
  core_->set_policy(policy);
}

void GradScaler::set_growth_factor(double factor) {
  change([&](ScalePolicy& policy) { policy.growth_factor = factor; });
}
void GradScaler::set_backoff_factor(double factor) {
  change([&](ScalePolicy& policy) { policy.backoff_factor = factor; });
}
void GradScaler::set_growth_interval(int64_t steps) {
  const int32_t interval = internal::checked_count(steps, "growth_interval");
  change([&](ScalePolicy& policy) { policy.growth_interval = interval; });
}

std::string GradScaler::save() const {
  const internal::TorchStream stream;
  return core_->save();
}
void GradScaler::load(const std::string& json) {
  if (!bridges_->waiting()) core_->assume_known();
  bridges_->with_all([&] { core_->load(json); });
  bridges_->next_round();
}
const ScalePolicy& GradScaler::policy() const { return core_->policy(); }
const ScaleState& GradScaler::state() const {
  const internal::TorchStream stream;
  return core_->state();
}

void GradScaler::name_parameters(const torch::nn::Module& module) { bridges_->names.add(module); }

}  // namespace headroom::libtorch
