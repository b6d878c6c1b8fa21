#ifndef HEADROOM_LIBTORCH_GRAD_SCALER_H_
#define HEADROOM_LIBTORCH_GRAD_SCALER_H_

#include <headroom/export.h>
#include <headroom/libtorch/state_dict.h>
#include <headroom/scaler.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace headroom::libtorch {

/// How a GradScaler scales. The defaults are those of torch.amp.GradScaler; any other policy or
/// preset of the core does as well:
///
///     GradScalerOptions().init_scale(1024).growth_interval(200)
///     GradScalerOptions(preset("megatron")).enabled(use_amp)
///     GradScalerOptions(parse_policy("torch:min_scale=1,max_skips_in_row=20"))
class HEADROOM_API GradScalerOptions {
 public:
  GradScalerOptions() : policy_(preset("torch")) {}
  /// A ScalePolicy, StaticScale, DynamicScale or HeadroomScale.
  template <typename Policy,
            typename = std::enable_if_t<std::is_convertible_v<Policy, ScalePolicy>>>
  GradScalerOptions(const Policy& policy) : policy_(policy) {}  // NOLINT: meant to be implicit

  /// PyTorch's.
  GradScalerOptions& init_scale(double scale);
  GradScalerOptions& growth_factor(double factor);
  GradScalerOptions& backoff_factor(double factor);
  GradScalerOptions& growth_interval(int64_t steps);
  GradScalerOptions& enabled(bool enabled);

  /// Where the scale lives, as in PyTorch's constructor; torch::kCUDA without an index is the
  /// device that is current at this call. On a CUDA device step() and update() never wait with
  /// FusedAdamW and FusedSGD: their report is pending; report() or try_report() returns the result.
  GradScalerOptions& device(const torch::Device& device);

  /// Beyond PyTorch; see ScalerOptions.
  GradScalerOptions& ranks(std::shared_ptr<Ranks> ranks,
                           RankGradients gradients = RankGradients::kReplicated);
  GradScalerOptions& on_alarm(std::function<void(const AlarmReport&)> callback);

  const ScalePolicy& policy() const { return policy_; }
  bool enabled() const { return scaler_.enabled; }

 private:
  friend class GradScaler;
  ScalePolicy policy_;
  ScalerOptions scaler_;
};

namespace internal {
class Bindings;
}  // namespace internal

/// torch.amp.GradScaler for C++: the same calls, in the same order, with the same rules.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);                     // only to clip or look by hand
///     torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
///     StepReport report = scaler.step(optimizer);     // report.applied says whether it ran
///     scaler.update();
///
/// Takes every torch::optim optimizer, gradients of FP16, BF16, FP32, FP64 and complex types, any
/// strides, sparse ones (duplicates are summed first), undefined ones (left out). Calls at the
/// wrong moment throw headroom::Error where PyTorch raises.
///
/// What differs from PyTorch: a skipped step zeroes its gradients; gradients are checked once more
/// in step(), so that NaN which came in after unscale_() does no harm; a parameter in two
/// optimizers that step in one round is refused; scales of 0, inf or NaN are refused everywhere.
///
/// With torch's own optimizers 16-bit gradients are unscaled in place, in 16 bits, where small ones
/// underflow again; FusedAdamW and FusedSGD do not have that loss.
///
/// One thread at a time may use a GradScaler. An optimizer has to outlive the round (until
/// update()) that it was used in.
class HEADROOM_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// loss x scale, in FP32 if the loss is FP16 or BF16. Part of the graph, so that second
  /// derivatives work. Disabled: the loss itself.
  torch::Tensor scale(const torch::Tensor& loss);
  std::vector<torch::Tensor> scale(const std::vector<torch::Tensor>& losses);

  /// Divides the gradients by the scale, in place, and says what was found. Without a step,
  /// update() multiplies them by the scale again.
  GradStats unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales (unless that was done), checks, and runs or skips optimizer.step(). The report says
  /// which, and names the culprit. StepOptions::max_norm clips in the same pass.
  StepReport step(torch::optim::Optimizer& optimizer, const StepOptions& options = {});

  /// The closure computes the loss and calls scale(loss).backward(); it runs once, then comes
  /// step(). Error(kUnsupported) for LBFGS, which calls its closure many times in one step.
  StepReport step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure,
                  const StepOptions& options = {});

  /// What the last step() did: waits for it, or takes the newest that is done, if any.
  StepReport report() const;
  std::optional<StepReport> try_report() const;

  /// Moves the scale, once for all optimizers, and begins the next round. A backward of a loss that
  /// was scaled before throws Error(kWrongOrder) from then on, unless the scale is static.
  void update();

  /// Sets the scale by hand; the growth count stays, as in PyTorch. The tensor has one element and
  /// needs no gradient. Refused while gradients wait that were made with the old scale.
  void update(double new_scale);
  void update(const torch::Tensor& new_scale);

  /// After update(), with a policy that retries ("headroom-retry"): whether to run the last batch
  /// again, because it was skipped and the scale is lower now. With such a policy a second
  /// optimizer in one round is refused by step(): the first would be stepped twice.
  bool retry() const;

  /// Call after gradients of scaled losses were dropped without a step.
  void discard();

  double get_scale() const;
  double get_growth_factor() const;
  double get_backoff_factor() const;
  int64_t get_growth_interval() const;
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(int64_t steps);
  bool is_enabled() const;

  /// PyTorch's five numbers; empty if disabled. Belongs after update(): between step() and it, it
  /// throws Error(kWrongOrder), as save() does. load_state_dict() does nothing if disabled, and
  /// throws Error(kBadState), changing nothing, if a number is missing or impossible.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

  /// Everything that a policy beyond PyTorch's remembers, as in headroom::GradScaler.
  std::string save() const;
  void load(const std::string& json);

  const ScalePolicy& policy() const;
  ScaleState state() const;

  /// From now on reports call the module's parameters by their names: "layer1.weight: 3 inf, 0 nan"
  /// instead of "param_groups[0].params[2]".
  void name_parameters(const torch::nn::Module& module);

 private:
  torch::Tensor scale_on_device(const torch::Tensor& loss);
  void change(const char* setting, double value);
  void set_record(const headroom::internal::ScaleRecord& record, const char* call);

  bool on_device_ = false;
  bool alone_ = true;                           // no other ranks
  std::shared_ptr<headroom::GradScaler> core_;  // shared with the hooks on losses
  std::unique_ptr<internal::Bindings> bindings_;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_GRAD_SCALER_H_
