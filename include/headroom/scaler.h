// scaler: GradScaler drives the stages (measure, agree, decide, apply) and maintains the scale.
#ifndef HEADROOM_SCALER_H_
#define HEADROOM_SCALER_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <headroom/measure.h>
#include <headroom/optimizer.h>
#include <headroom/owned.h>
#include <headroom/policy.h>
#include <headroom/runtime.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace headroom {

/// When step() zeroes the gradients.
enum class ClearGrads : uint8_t {
  kOnSkip,  // zero the gradients of a skipped step, leave them after an applied one
  kAlways,  // zero them after every step, in the same pass over memory
  kNever,
};

/// Options of one step.
struct StepOptions {
  /// Clips the unscaled gradients to this L2 norm. 0: no clipping.
  float max_norm = 0.0f;
  /// Skips the step, without a change of the scale, if that norm is larger than this. 0: never.
  float skip_above_norm = 0.0f;
  ClearGrads clear_grads = ClearGrads::kOnSkip;
  Stream stream = {};  // for parameters on a CUDA device
};

/// The result of one step.
struct StepReport {
  /// The step was enqueued on a CUDA device and the rest of this report is empty: call report() or
  /// try_report() of the scaler.
  bool pending = false;

  /// Whether the optimizer ran.
  bool applied = false;
  Skip skip = Skip::kNo;     // why it was not applied
  float scale = 1.0f;        // with which these gradients were computed
  double grad_norm = 0.0;    // L2 norm of the unscaled gradients before clipping; inf or nan if bad
  double clip_factor = 1.0;  // by which clipping has multiplied them
  GradStats stats;           // over all ranks, of the gradients as they are in memory
  std::string culprit;       // the first bad tensor: "embed.weight: 3 inf, 0 nan"; empty if none
  int64_t steps = 0;         // of this optimizer under this scaler so far, this one included,
  int64_t skipped = 0;       // of which skipped

  /// One line for a log: "skipped at scale 65536: embed.weight: 3 inf, 0 nan".
  HEADROOM_API std::string to_string() const;
};

/// The scale has collapsed: passed to ScalerOptions::on_alarm, or thrown as an Error.
struct AlarmReport {
  Alarm alarm = Alarm::kNone;
  float scale = 0.0f;  // of the last skipped step
  int64_t skips_in_row = 0;
  std::string culprit;   // of the last skipped step
  std::string sentence;  // what is wrong and what to do
};

/// Options of a scaler.
struct ScalerOptions {
  /// false: scale() returns the loss unchanged, unscale_() and update() do nothing, step() may be
  /// called at any time. A step with inf or nan in its gradients is still skipped.
  bool enabled = true;

  /// Where the scale, the counters and the verdicts are. On a CUDA device, scale(), unscale_(),
  /// step() and update() enqueue on a stream and return, and may be captured in a CUDA graph. All
  /// gradients have to be on that device.
  Device device = {};

  /// The ranks that train together; null for a single process. All make the same calls with the
  /// same settings: scale() in every round (a loss of 0 if a rank has none), unscale_() and step()
  /// of each optimizer (even without gradients), update(). step() and unscale_() wait for all ranks
  /// and throw Error(kRankLost) if one does not answer, or Error(kRanksDiffer); weights are
  /// unchanged then.
  std::shared_ptr<Ranks> ranks = nullptr;
  RankGradients gradients = RankGradients::kReplicated;

  /// Called at the end of update() after an overflow with the scale at its floor, or when
  /// max_skips_in_row is reached. If null, update() throws Error(kScaleCollapsed) instead; the
  /// update is complete in both cases. With a CUDA device, it is called by the first update(),
  /// report() or try_report() after the device has sent the alarm.
  std::function<void(const AlarmReport&)> on_alarm = nullptr;
};

/// Scales losses, unscales gradients, skips bad steps and adapts the scale, with the call order of
/// torch.amp.GradScaler, for any C++ training loop.
///
///     scaled = scaler.scale(loss);            // then backward
///     report = scaler.step(optimizer);        // once for each optimizer
///     scaler.update();                        // once, after all of them
///
/// Not thread-safe, including the optimizers that it steps. On the CPU, several threads may call
/// get_scale(), state(), policy() and save() at the same time while no thread changes the scaler.
///
/// With ScalerOptions::device on a CUDA device the same calls never wait (docs/cuda.md). Only the
/// first step allocates memory; a CUDA graph may be captured after it.
class HEADROOM_API GradScaler {
 public:
  /// Throws Error(kInvalidArgument) if the policy or an option is invalid.
  explicit GradScaler(const ScalePolicy& policy = DynamicScale{}, ScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// ScalerOptions::enabled, and the policy.
  bool enabled() const;
  const ScalePolicy& policy() const;

  /// Changes the policy but not the scale; under the same rule, counts that are possible stay.
  /// Throws Error(kInvalidArgument), changing nothing, if a setting is invalid or the new bounds
  /// exclude the current scale.
  void set_policy(const ScalePolicy& policy);

  /// The scale that the next scale() multiplies by; 1 if disabled. Waits for a CUDA device.
  float get_scale() const;

  /// loss x scale, always in FP32. May be called several times before a step, for several losses or
  /// for micro-batches whose gradients are accumulated.
  float scale(float loss);
  float scale(f16 loss) { return scale(static_cast<float>(loss)); }
  float scale(bf16 loss) { return scale(static_cast<float>(loss)); }

  /// The same for tensors: scaled = loss x scale. `scaled` is f32 and may be the memory of the
  /// loss. A scaler on a CUDA device supports only this form.
  void scale(const TensorView& loss, const TensorView& scaled, Stream stream = {});

  /// For trainers whose loss and backward are one fused kernel: the device address of the scale,
  /// valid as long as the scaler. From then on a scaled loss is assumed in every round. Throws
  /// Error(kUnsupported) unless the scaler is enabled and on a CUDA device.
  const float* device_scale();

  /// Divides the gradients of `optimizer` by the scale in place, to clip or inspect them before
  /// step(). FP16 gradients may underflow again, which is counted in the result;
  /// StepOptions::max_norm clips without that loss. Allowed once per optimizer between updates,
  /// and no backward may add to the gradients before step(). Without a step, update() multiplies
  /// them by the scale again. The result is that of all ranks, and empty on a CUDA device. The
  /// gradients are unscaled even if Error(kRankLost) or Error(kRanksDiffer) is thrown.
  GradStats unscale_(Optimizer& optimizer, Stream stream = {});

  /// Measures, decides, and applies or skips. A skipped step changes no weight, no optimizer state
  /// and no step count. Gradients are checked even after unscale_(). With OnOverflow::kThrow a bad
  /// step is skipped and then reported by Error(kOverflow). Allowed once between updates for each
  /// optimizer, and only if at least one of its parameters has a gradient (on any rank).
  StepReport step(Optimizer& optimizer, const StepOptions& options = {});

  /// The result of the last step(), of any or one optimizer; Error(kWrongOrder) if there was none.
  /// On a CUDA device report() waits, and try_report() returns the newest result that is available.
  StepReport report() const;
  StepReport report(const Optimizer& optimizer) const;
  std::optional<StepReport> try_report() const;
  std::optional<StepReport> try_report(const Optimizer& optimizer) const;

  /// Updates the scale by the results of the steps since the last update, and begins the next
  /// round. Gradients that wait for a later step (micro-batches that continue after this update)
  /// are rescaled in place to the new scale. This covers optimizers from their first step() or
  /// unscale_() on.
  void update(Stream stream = {});

  /// Sets the scale and begins the next round. Counts stay; the memory of HeadroomScale is reset.
  /// Throws, changing nothing, if the policy forbids the scale or scaled losses wait for a step.
  void set_scale(float scale);

  /// After update(), with a policy that retries: whether to run the last batch again, because it
  /// was skipped and the scale is lower now. False for a batch that overflows at any scale.
  ///
  ///     do { backward(scaler.scale(loss)); scaler.step(optimizer); scaler.update(); }
  ///     while (scaler.retry());
  ///
  /// Then step() throws Error(kUnsupported) for a second optimizer, or for a GradAccumulator.
  bool retry() const;

  /// Call this after gradients of scaled losses were zeroed or overwritten without a step.
  void discard();

  /// Policy, scale and everything else that changes during training. load_state() begins the next
  /// round. It throws, changing nothing: Error(kBadState) if a value is impossible,
  /// Error(kWrongOrder) if scaled losses wait for a step (see discard()).
  ScaleState state() const;
  void load_state(const ScaleState& state);

  /// The same as JSON text with exact numbers. save() throws between step() and update().
  std::string save() const;
  void load(std::string_view json);

 private:
  friend struct internal::ScalerAccess;
  internal::Owned<internal::Scaler> impl_;
};

}  // namespace headroom

#endif  // HEADROOM_SCALER_H_
