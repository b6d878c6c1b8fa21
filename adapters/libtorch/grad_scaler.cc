// torch.amp.GradScaler's interface on top of headroom::GradScaler. Converts tensors, options and
// state; all rules are the core's. Work on CUDA tensors is enqueued on LibTorch's current stream.
#include <headroom/error.h>
#include <headroom/libtorch/grad_scaler.h>
#include <headroom/libtorch/optim.h>
#include <torch/torch.h>

#include <iterator>

#include "binding.h"
#include "core/check.h"
#include "fused.h"
#include "scaler/scaler.h"
#include "state_dict.h"

namespace headroom::libtorch {

using headroom::internal::ScalerAccess;
using headroom::internal::ScaleStateAccess;

namespace internal {

/// The bindings of all optimizers that a scaler has used.
class Bindings {
 public:
  Names names;
  torch::Tensor one;  // a 1 on the CUDA device, which the core multiplies by the scale there

  /// The binding of an optimizer, updated to its present parameters. Throws
  /// Error(kInvalidArgument) if another optimizer of this round has one of them. Bindings of
  /// earlier rounds that share a parameter are dropped, because their optimizer may not exist any
  /// more.
  Binding& bind(torch::optim::Optimizer& optimizer, int64_t round) {
    Entry& entry = entries_[&optimizer];
    const std::shared_ptr<Binding> binding = entry.binding_of(optimizer);
    binding->bind(optimizer, names);
    for (auto other = entries_.begin(); other != entries_.end();) {
      const std::shared_ptr<Binding> theirs = other->second.alive();
      const bool shared =
          theirs != nullptr && theirs != binding && theirs->shares_parameter(*binding);
      if (shared && other->second.round == round) {
        binding->release();
        throw Error(
            ErrorCode::kInvalidArgument,
            "A parameter of this optimizer also belongs to another optimizer that was used since "
            "the last update(); give each parameter to one optimizer only.");
      }
      if (shared) theirs->forget_gradients();
      other = shared || theirs == nullptr ? entries_.erase(other) : std::next(other);
    }
    return *binding;
  }

  /// Records a call that the core has accepted.
  void used(torch::optim::Optimizer& optimizer, int64_t round) {
    entries_[&optimizer].round = round;
  }

 private:
  struct Entry {
    std::shared_ptr<PlainBinding> plain;  // of a torch optimizer, which cannot report its end
    std::weak_ptr<FusedBody> fused;       // owned by our optimizer
    int64_t round = -1;                   // of the last use

    std::shared_ptr<Binding> alive() const {
      if (plain != nullptr) return plain;
      return fused.lock();
    }
    std::shared_ptr<Binding> binding_of(torch::optim::Optimizer& optimizer) {
      if (auto* const ours = dynamic_cast<FusedOptimizer*>(&optimizer)) {
        plain = nullptr;
        fused = ours->body_;
        return ours->body_;
      }
      if (plain == nullptr) plain = std::make_shared<PlainBinding>();
      return plain;
    }
  };
  // By address. An address may be reused by another optimizer: bind() then replaces the parameters.
  std::map<const torch::optim::Optimizer*, Entry> entries_;
};

namespace {

/// Binds an optimizer for one call of the core, on LibTorch's current stream.
class Bound {
 public:
  Bound(torch::optim::Optimizer& optimizer, Bindings& bindings, const headroom::GradScaler& scaler)
      : optimizer_(optimizer),
        bindings_(bindings),
        round_(ScalerAccess::round(scaler)),
        binding_(bindings.bind(optimizer, round_)) {}
  ~Bound() { binding_.release(); }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  Binding* operator->() { return &binding_; }
  headroom::Optimizer& core() { return binding_.core(); }
  void used() { bindings_.used(optimizer_, round_); }

 private:
  TorchStream stream_;
  torch::optim::Optimizer& optimizer_;
  Bindings& bindings_;
  int64_t round_;
  Binding& binding_;
};

/// The core with its work on LibTorch's current stream, for one expression.
class OnTorchStream {
 public:
  explicit OnTorchStream(headroom::GradScaler& core) : core_(core) {}
  headroom::GradScaler* operator->() { return &core_; }

 private:
  TorchStream stream_;
  headroom::GradScaler& core_;
};

// Runs the optimizer without the core.
StepReport run(torch::optim::Optimizer& optimizer,
               const torch::optim::Optimizer::LossClosure& closure) {
  optimizer.step(closure);
  StepReport report;
  report.applied = true;
  return report;
}

// Whether any parameter has a gradient, without binding the optimizer.
bool has_gradient(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) return true;
    }
  }
  return false;
}

}  // namespace
}  // namespace internal

using internal::Bound;
using internal::OnTorchStream;

namespace {

// The constructor of a scaler on a CUDA device enqueues the initial state.
std::unique_ptr<headroom::GradScaler> make_core(const ScalePolicy& policy, ScalerOptions options) {
  const internal::TorchStream stream;
  return std::make_unique<headroom::GradScaler>(policy, std::move(options));
}

}  // namespace

GradScalerOptions& GradScalerOptions::device(const torch::Device& device) {
  scaler_.device = internal::core_device(device, internal::current_cuda_device());
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
      single_rank_(options.scaler_.ranks == nullptr),
      core_(make_core(options.policy_, std::move(options.scaler_))),
      bindings_(std::make_unique<internal::Bindings>()) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

torch::Tensor GradScaler::scale(const torch::Tensor& loss) {
  if (!is_enabled()) return loss;
  if (!loss.defined() || !loss.is_floating_point()) {
    throw Error(ErrorCode::kInvalidArgument,
                "The argument of scale() is undefined or not of a floating-point type; pass the "
                "loss.");
  }
  // FP16 cannot hold loss x scale.
  const torch::Tensor wide = loss.element_size() < 4 ? loss.to(torch::kFloat) : loss;
  const torch::Tensor scaled = on_device_
                                   ? wide * scale_on_device(loss)
                                   : wide * static_cast<double>(ScalerAccess::begin_loss(*core_));
  if (scaled.requires_grad()) {
    // The hook runs in backward, which may be long after this call or never.
    scaled.register_hook([core = core_, round = ScalerAccess::round(*core_)](const torch::Tensor&) {
      ScalerAccess::gradients_added(*core, round);
    });
  }
  return scaled;
}

// A copy of the device's scale, which later updates do not change.
torch::Tensor GradScaler::scale_on_device(const torch::Tensor& loss) {
  const internal::TorchStream stream;
  if (!bindings_->one.defined()) {
    bindings_->one = torch::ones({}, loss.options().dtype(torch::kFloat).requires_grad(false));
  }
  const torch::Tensor factor = torch::empty_like(bindings_->one);
  ScalerAccess::begin_loss(*core_, view_of(bindings_->one, "The loss"),
                           view_of(factor, "The scaled loss"));
  return factor;
}

std::vector<torch::Tensor> GradScaler::scale(const std::vector<torch::Tensor>& losses) {
  std::vector<torch::Tensor> scaled;
  for (const torch::Tensor& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

GradStats GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return {};
  Bound bound(optimizer, *bindings_, *core_);
  const GradStats stats = core_->unscale_(bound.core());
  bound.used();
  return stats;
}

// Torch's optimizers need the verdict on the host, so their step waits; fused ones do not.
StepReport GradScaler::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  if (!is_enabled() && single_rank_ && !internal::has_gradient(optimizer)) {
    return internal::run(optimizer, nullptr);  // PyTorch does this, and the core would refuse it
  }
  Bound bound(optimizer, *bindings_, *core_);
  const StepReport report = core_->step(bound.core(), options);
  bound.used();
  // A pending step may turn out to be skipped; an unneeded version increment does no harm.
  if (report.applied || report.pending) bound->weights_written();
  return report;
}

StepReport GradScaler::step(torch::optim::Optimizer& optimizer,
                            const torch::optim::Optimizer::LossClosure& closure,
                            const StepOptions& options) {
  if (closure == nullptr) return step(optimizer, options);
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    if (!is_enabled()) return internal::run(optimizer, closure);
    internal::unsupported(
        "LBFGS calls its closure several times in one step and changes the weights in "
        "between, so the step cannot be skipped as a whole. Use it without a scaler, in "
        "FP32 or BF16.");
  }
  {
    const torch::AutoGradMode with_grad(true);
    closure();
  }
  return step(optimizer, options);
}

void GradScaler::update() { OnTorchStream(*core_)->update(); }

// Disabled scalers have an empty state dict, as in PyTorch.
StateDict GradScaler::state_dict() const {
  if (!is_enabled()) return {};
  save();  // only for its check: throws between step() and update()
  return internal::to_state_dict(ScaleStateAccess::record(state()));
}

void GradScaler::load_state_dict(const StateDict& saved) {
  if (!is_enabled()) return;
  const internal::TorchStream stream;
  const ScaleState now = core_->state();
  ScalerAccess::set_record(*core_, internal::with_state_dict(ScaleStateAccess::record(now), saved),
                           "load_state_dict()");
}

void GradScaler::update(double new_scale) {
  const internal::TorchStream stream;
  ScalerAccess::set_scale(*core_, static_cast<float>(new_scale), "update(new_scale)");
}

// item() waits for a tensor on a CUDA device.
void GradScaler::update(const torch::Tensor& new_scale) {
  if (!is_enabled()) return;
  if (!new_scale.defined() || new_scale.numel() != 1 || new_scale.requires_grad()) {
    throw Error(ErrorCode::kInvalidArgument,
                "update(new_scale) needs a tensor with one element that does not require grad.");
  }
  update(new_scale.item<double>());
}

void GradScaler::discard() { core_->discard(); }

StepReport GradScaler::report() const { return OnTorchStream(*core_)->report(); }
std::optional<StepReport> GradScaler::try_report() const {
  return OnTorchStream(*core_)->try_report();
}
bool GradScaler::retry() const { return OnTorchStream(*core_)->retry(); }
double GradScaler::get_scale() const { return OnTorchStream(*core_)->get_scale(); }
double GradScaler::get_growth_factor() const { return policy().get("growth_factor"); }
double GradScaler::get_backoff_factor() const { return policy().get("backoff_factor"); }
int64_t GradScaler::get_growth_interval() const {
  return static_cast<int64_t>(policy().get("growth_interval"));
}
bool GradScaler::is_enabled() const { return core_->enabled(); }

void GradScaler::set(const char* setting, double value) {
  ScalePolicy policy = core_->policy();
  policy.set(setting, value);
  OnTorchStream(*core_)->set_policy(policy);
}
void GradScaler::set_growth_factor(double factor) { set("growth_factor", factor); }
void GradScaler::set_backoff_factor(double factor) { set("backoff_factor", factor); }
void GradScaler::set_growth_interval(int64_t steps) {
  set("growth_interval", static_cast<double>(steps));
}

std::string GradScaler::save() const { return OnTorchStream(*core_)->save(); }
void GradScaler::load(const std::string& json) { OnTorchStream(*core_)->load(json); }
const ScalePolicy& GradScaler::policy() const { return core_->policy(); }
ScaleState GradScaler::state() const { return OnTorchStream(*core_)->state(); }

void GradScaler::name_parameters(const torch::nn::Module& module) { bindings_->names.add(module); }

}  // namespace headroom::libtorch
