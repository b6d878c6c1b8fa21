// scaler: GradScaler drives the stages in order (measure, agree, decide, apply) and keeps the
// scale. It knows no kernels.
#ifndef HEADROOM_SCALER_H_
#define HEADROOM_SCALER_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <headroom/measure.h>
#include <headroom/optimizer.h>
#include <headroom/policy.h>
#include <headroom/runtime.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace headroom {

enum class ClearGrads : uint8_t {
  kOnSkip,  // zero the gradients of a skipped step, leave them after an applied one
  kAlways,  // zero them after every step, in the same pass over memory
  kNever,
};

struct StepOptions {
  /// Clip so that the L2 norm of the unscaled gradients is at most this. 0: no clipping.
  float max_norm = 0.0f;
  /// Skip the step if that norm is above this. The scale stays: it is not an overflow. 0: never.
  float skip_above_norm = 0.0f;
  ClearGrads clear_grads = ClearGrads::kOnSkip;
  Stream stream = {};  // for parameters on a CUDA device
};

/// What one step did.
struct StepReport {
  /// The step was enqueued on a CUDA device and the rest of this report is empty: call report() or
  /// try_report() of the scaler.
  bool pending = false;

  bool applied = false;
  Skip skip = Skip::kNo;     // why not
  float scale = 1.0f;        // the scale these gradients were made with
  double grad_norm = 0.0;    // L2 norm of the unscaled gradients before clipping; inf or nan if bad
  double clip_factor = 1.0;  // what clipping multiplied by
  GradStats stats;           // of the gradients in memory: scaled, or unscaled after unscale_;
                             // with ScalerOptions::ranks: of all ranks
  std::string culprit;       // the first bad tensor: "embed.weight: 3 inf, 0 nan"; empty if none
  int64_t steps = 0;         // of this optimizer under this scaler so far, this one included,
  int64_t skipped = 0;       // of which skipped

  /// One line for a log: "skipped at scale 65536: embed.weight: 3 inf, 0 nan".
  HEADROOM_API std::string to_string() const;
};

/// Training is in trouble: passed to ScalerOptions::on_alarm, or thrown.
struct AlarmReport {
  Alarm alarm = Alarm::kNone;
  float scale = 0.0f;  // of the last skipped step
  int64_t skips_in_row = 0;
  std::string culprit;   // of the last skipped step
  std::string sentence;  // what is wrong and what to do
};

struct ScalerOptions {
  /// false: scale() returns the loss as it is, unscale_() and update() do nothing, and step() may
  /// be called at any time. A step with inf or nan in its gradients is skipped all the same.
  bool enabled = true;

  /// Where the scale lives. On a CUDA device it, all counters and every verdict are there: scale(),
  /// unscale_(), step() and update() enqueue on a stream and return, and may be captured in a CUDA
  /// graph. All gradients have to be on that device.
  Device device = {};

  /// The ranks that train together; null: this process is alone. All of them then make the same
  /// calls with the same settings: scale() in every round (a rank without a loss: of 0), unscale_()
  /// and step() of each optimizer (on a rank that has no gradients, too), update(). step() and
  /// unscale_() wait for all ranks and throw Error(kRankLost) if one does not come, or
  /// Error(kRanksDiffer) if they do not fit together; the weights are then as before.
  std::shared_ptr<Ranks> ranks = nullptr;
  RankGradients gradients = RankGradients::kReplicated;

  /// Called at the end of update() when an overflow finds the scale at its floor, or when
  /// max_skips_in_row is reached. Without it update() throws Error(kScaleCollapsed) instead. Either
  /// way update() has done its work. With a CUDA device: by the first update(), report() or
  /// try_report() after the device has noticed.
  std::function<void(const AlarmReport&)> on_alarm = nullptr;
};

/// Scales losses, unscales gradients, skips bad steps, adapts the scale: torch.amp.GradScaler's
/// rules of use, for any C++ training loop.
///
///     scaled = scaler.scale(loss);            // then backward
///     report = scaler.step(optimizer);        // once for each optimizer
///     scaler.update();                        // once, after all of them
///
/// One thread at a time may use a GradScaler and the optimizers it has stepped. For one on the CPU,
/// any number of threads may call get_scale(), state(), policy() and save() while none changes it.
///
/// With ScalerOptions::device on a CUDA device the same calls never wait (docs/cuda.md). The first
/// step allocates memory and the following ones none; a graph may be captured after it. Replays
/// change the device's state, which state(), get_scale(), report() and save() then return.
class HEADROOM_API GradScaler {
 public:
  /// Throws Error(kInvalidArgument) if a setting is impossible.
  explicit GradScaler(const ScalePolicy& policy = DynamicScale{}, ScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  bool enabled() const;
  const ScalePolicy& policy() const;

  /// Changes how the scale moves from now on. The scale stays, and under the same rule so do all
  /// counts that are still possible. Throws Error(kInvalidArgument), changing nothing, if a setting
  /// is impossible or the new bounds forbid the present scale.
  void set_policy(const ScalePolicy& policy);

  /// The scale that the next scale() multiplies by; 1 if disabled. Waits for a CUDA device.
  float get_scale() const;

  /// loss x scale, in FP32 whatever the type of the loss. May be called several times before a
  /// step: several losses, or micro-batches whose gradients add up.
  float scale(float loss);
  float scale(f16 loss) { return scale(static_cast<float>(loss)); }
  float scale(bf16 loss) { return scale(static_cast<float>(loss)); }

  /// The same for tensors: scaled = loss x scale. `scaled` is f32 and may be the loss's own memory.
  /// The only scale() of a scaler on a CUDA device.
  void scale(const TensorView& loss, const TensorView& scaled, Stream stream = {});

  /// For a scaler on a CUDA device, where loss and backward are one fused kernel: the address there
  /// of the scale to multiply by, valid as long as the scaler lives. From now on scale() need not
  /// be called: a loss is assumed to have been scaled before every step. Throws Error(kUnsupported)
  /// for a scaler on the CPU or a disabled one.
  const float* device_scale();

  /// Divides the gradients of `optimizer` by the scale, in place, to clip or inspect them by hand
  /// before step(). FP16 gradients that underflow again are counted in the result;
  /// StepOptions::max_norm clips without that loss. At most once between updates for each
  /// optimizer, and no backward may add to them before step(); without a step, update() multiplies
  /// them by the scale again. On a CUDA device the result is empty. With ranks it is that of all of
  /// them, and the gradients are unscaled even if Error(kRankLost) or Error(kRanksDiffer) is
  /// thrown.
  GradStats unscale_(Optimizer& optimizer, Stream stream = {});

  /// Measures, decides, and applies or skips. A skipped step changes no weight, no state and no
  /// step count. Gradients are checked even after unscale_, so that inf or nan that came in since
  /// then does no harm. With OnOverflow::kThrow a bad step is skipped and then reported by
  /// Error(kOverflow). At most once between updates for each optimizer, and only if at least one of
  /// its parameters has a gradient (with ranks: on any of them).
  StepReport step(Optimizer& optimizer, const StepOptions& options = {});

  /// The result of the last step(), of all or of one optimizer: waits, or returns the newest done.
  StepReport report() const;
  StepReport report(const Optimizer& optimizer) const;
  std::optional<StepReport> try_report() const;
  std::optional<StepReport> try_report(const Optimizer& optimizer) const;

  /// Moves the scale by what the steps since the last update found, and begins the next round.
  /// Gradients that wait for a later step (micro-batches that continue after this update) are
  /// rescaled in place, so that what is added to them later fits. An optimizer is known from its
  /// first step() or unscale_() on.
  void update(Stream stream = {});

  /// Sets the scale by hand and begins the next round; growth starts counting again. Throws,
  /// changing nothing, if the policy's bounds forbid it, or if losses wait for a step.
  void set_scale(float scale);

  /// After update(), with a policy that retries: whether to run the last batch again, because it
  /// was skipped and the scale is lower now. False for a batch that no scale helps.
  ///
  ///     do { backward(scaler.scale(loss)); scaler.step(optimizer); scaler.update(); }
  ///     while (scaler.retry());
  ///
  /// Then step() throws Error(kUnsupported) for a second optimizer, or for a GradAccumulator.
  bool retry() const;

  /// Call after gradients of scaled losses were dropped (zeroed, or overwritten) without a step.
  void discard();

  /// The scale and everything else that changes while training; and back, policy included, which
  /// begins the next round. load_state() throws, changing nothing: Error(kBadState) if a value is
  /// impossible, Error(kWrongOrder) if losses wait (see discard()).
  ScaleState state() const;
  void load_state(const ScaleState& state);

  /// The same as JSON text, every number exact. save() throws between step() and update().
  std::string save() const;
  void load(std::string_view json);

 private:
  friend struct internal::ScalerAccess;
  std::unique_ptr<internal::Scaler> impl_;
};

}  // namespace headroom

#endif  // HEADROOM_SCALER_H_
