// torch.amp.GradScaler for C++: scales losses and steps torch's optimizers or our fused ones.
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

/// The options of a GradScaler. The defaults are those of torch.amp.GradScaler; every other policy
/// and preset of the core can be used too:
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

  /// PyTorch's options. A setting that the policy does not have throws Error(kInvalidArgument); its
  /// value is checked by the constructor of GradScaler.
  GradScalerOptions& init_scale(double scale) { return set("init_scale", scale); }
  GradScalerOptions& growth_factor(double factor) { return set("growth_factor", factor); }
  GradScalerOptions& backoff_factor(double factor) { return set("backoff_factor", factor); }
  /// Clean steps in a row before the scale grows.
  GradScalerOptions& growth_interval(int64_t steps) {
    return set("growth_interval", static_cast<double>(steps));
  }
  /// A disabled scaler scales by 1, and still skips steps with inf or NaN.
  GradScalerOptions& enabled(bool enabled) {
    scaler_.enabled = enabled;
    return *this;
  }

  /// Where the scale is stored, as in PyTorch's constructor; torch::kCUDA without an index is the
  /// current device at this call. On a CUDA device step() and update() never wait with the fused
  /// optimizers: their report is pending, and report() or try_report() returns the result.
  GradScalerOptions& device(const torch::Device& device);

  /// Not in PyTorch; see ScalerOptions.
  GradScalerOptions& ranks(std::shared_ptr<Ranks> ranks,
                           RankGradients gradients = RankGradients::kReplicated);
  GradScalerOptions& on_alarm(std::function<void(const AlarmReport&)> callback);

  /// The options' values.
  const ScalePolicy& policy() const { return policy_; }
  bool enabled() const { return scaler_.enabled; }

 private:
  friend class GradScaler;
  GradScalerOptions& set(const char* setting, double value) {
    policy_.set(setting, value);
    return *this;
  }

  ScalePolicy policy_;
  ScalerOptions scaler_;
};

namespace internal {
class Bindings;
}  // namespace internal

/// torch.amp.GradScaler for C++: the same calls, in the same order, with the same rules.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);                     // only to clip or inspect by hand
///     torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
///     StepReport report = scaler.step(optimizer);     // report.applied: whether it ran
///     scaler.update();
///
/// Accepts every torch::optim optimizer and gradients of FP16, BF16, FP32, FP64 and complex types,
/// with any strides, sparse (duplicates are summed first) or undefined (ignored). Where PyTorch
/// raises because of the order of calls, headroom::Error(kWrongOrder) is thrown.
///
/// Differences from PyTorch: a skipped step zeroes its gradients; step() checks the gradients
/// again, so that NaN introduced after unscale_() skips the step; a parameter in two optimizers of
/// the same round is refused; scales of 0, inf or NaN are refused everywhere.
///
/// With torch's own optimizers 16-bit gradients are unscaled in place, in 16 bits, where small ones
/// underflow again; the fused optimizers avoid that loss.
///
/// One thread at a time may use a GradScaler. An optimizer must live until the update() after its
/// last use. CUDA work goes to LibTorch's current stream.
class HEADROOM_API GradScaler {
 public:
  /// A scaler at the policy's first scale.
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// loss x scale, in FP32 if the loss is FP16 or BF16. The product is part of the autograd graph,
  /// so second derivatives work. Returns the loss itself if disabled. Throws
  /// Error(kInvalidArgument) unless the loss is a floating-point tensor.
  torch::Tensor scale(const torch::Tensor& loss);
  std::vector<torch::Tensor> scale(const std::vector<torch::Tensor>& losses);

  /// Divides the gradients by the scale in place and returns their statistics. If no step follows,
  /// update() multiplies them by the scale again.
  GradStats unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales the gradients (unless unscale_() has), checks them, and runs or skips
  /// optimizer.step(). The report says which and names the first parameter with inf or nan.
  /// StepOptions::max_norm clips in the same pass.
  StepReport step(torch::optim::Optimizer& optimizer, const StepOptions& options = {});

  /// Runs the closure once, which computes the loss and calls scale(loss).backward(), then steps.
  /// Throws Error(kUnsupported) for LBFGS, which calls its closure several times in a step.
  StepReport step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure,
                  const StepOptions& options = {});

  /// The outcome of the last step(). report() waits for a CUDA device; try_report() never does and
  /// returns the newest finished step, if any.
  StepReport report() const;
  std::optional<StepReport> try_report() const;

  /// Adapts the scale, once after all optimizers have stepped, and begins the next round. Backward
  /// of a loss that was scaled earlier then throws Error(kWrongOrder), unless the scale is static.
  void update();

  /// Sets the scale, rounded to FP32, and keeps the growth count, as in PyTorch. A tensor must have
  /// one element and not require grad. Throws Error(kWrongOrder) while gradients of the old scale
  /// wait for a step.
  void update(double new_scale);
  void update(const torch::Tensor& new_scale);

  /// After update() with a policy that retries ("headroom-retry"): whether to run the last batch
  /// again, because it was skipped and the scale has been lowered. With such a policy step()
  /// refuses a second optimizer in a round, because a retry would step the first one twice.
  bool retry() const;

  /// Call this after dropping the gradients of scaled losses without a step.
  void discard();

  /// As in PyTorch; get_scale() waits for a scaler on a device.
  double get_scale() const;
  double get_growth_factor() const;
  double get_backoff_factor() const;
  int64_t get_growth_interval() const;
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(int64_t steps);
  bool is_enabled() const;

  /// PyTorch's five numbers; empty if disabled. Throws Error(kWrongOrder) between step() and
  /// update(), like save(). load_state_dict() does nothing if disabled; it throws Error(kBadState),
  /// changing nothing, if a number is missing or out of range. Both throw Error(kUnsupported) under
  /// a StaticScale or HeadroomScale, which the five numbers cannot describe: use save() and load().
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

  /// The complete state, including that of policies PyTorch does not have; see
  /// headroom::GradScaler.
  std::string save() const;
  void load(const std::string& json);

  /// The policy, and its state, which waits for a device.
  const ScalePolicy& policy() const;
  ScaleState state() const;

  /// Makes reports use the names of the module's parameters: "layer1.weight: 3 inf, 0 nan" instead
  /// of "param_groups[0].params[2]".
  void name_parameters(const torch::nn::Module& module);

 private:
  torch::Tensor scale_on_device(const torch::Tensor& loss);
  void set(const char* setting, double value);

  bool on_device_ = false;
  bool single_rank_ = true;
  std::shared_ptr<headroom::GradScaler> core_;  // shared with the hooks on losses
  std::unique_ptr<internal::Bindings> bindings_;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_GRAD_SCALER_H_
