// scaler: the front door. GradScaler walks the stations in order (measure, decide, apply), keeps
// the scale, and refuses calls that come at the wrong moment.
#ifndef HEADROOM_SCALER_H_
#define HEADROOM_SCALER_H_

#include <headroom/export.h>
#include <headroom/measure.h>
#include <headroom/optimizer.h>
#include <headroom/policy.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

enum class ClearGrads : uint8_t {
  kOnSkip,  // zero the gradients of a skipped step, leave them after an applied one
  kAlways,  // zero them after every step, in the same pass over memory
  kNever,
};

struct StepOptions {
  /// Clip so that the L2 norm of the unscaled gradients is at most this. 0: no clipping.
  float max_norm = 0.0f;
  ClearGrads clear_grads = ClearGrads::kOnSkip;
};

/// What one step did.
struct StepReport {
  bool applied = false;
  Skip skip = Skip::kNo;     // why not
  float scale = 1.0f;        // the scale these gradients were made with
  double grad_norm = 0.0;    // L2 norm of the unscaled gradients before clipping; inf or nan if bad
  double clip_factor = 1.0;  // what clipping multiplied by
  GradStats stats;           // of the gradients in memory: scaled, or unscaled after unscale_
  std::string culprit;       // the first bad tensor: "embed.weight: 3 inf, 0 nan"; empty if none

  /// One line for a log: "skipped at scale 65536: embed.weight: 3 inf, 0 nan".
  HEADROOM_API std::string to_string() const;
};

/// Training is in trouble: told to ScalerOptions::on_alarm, or thrown.
struct AlarmReport {
  Alarm alarm = Alarm::kNone;
  float scale = 0.0f;
  int64_t skips_in_row = 0;
  std::string culprit;   // of the last skipped step
  std::string sentence;  // what is wrong and what to do
};

struct ScalerOptions {
  /// false: scale() returns the loss as it is, unscale_() and update() do nothing, and step() may
  /// be called at any time. A step with inf or nan in its gradients is skipped all the same.
  bool enabled = true;

  /// Called at the end of update() when an overflow finds the scale at its floor, or when
  /// max_skips_in_row is reached. Without it update() throws Error(kScaleCollapsed) instead. Either
  /// way update() has done its work, and training may go on.
  std::function<void(const AlarmReport&)> on_alarm = nullptr;
};

/// Scales losses, unscales gradients, skips bad steps, adapts the scale: torch.amp.GradScaler's
/// rules of use, for any C++ training loop.
///
///     scaled = scaler.scale(loss);            // then backward
///     report = scaler.step(optimizer);        // once for each optimizer
///     scaler.update();                        // once, after all of them
///
/// One thread at a time may use a GradScaler and the optimizers it has stepped.
class HEADROOM_API GradScaler {
 public:
  /// Throws Error(kInvalidArgument) if a setting is impossible.
  explicit GradScaler(const ScalePolicy& policy = DynamicScale{}, ScalerOptions options = {});

  bool enabled() const { return options_.enabled; }
  const ScalePolicy& policy() const { return policy_; }

  /// Changes how the scale moves from now on; the scale stays, and so do all counts that are still
  /// possible (a shorter growth_interval may end with the next clean step). Throws
  /// Error(kInvalidArgument), changing nothing, if a setting is impossible or the new bounds forbid
  /// the present scale.
  void set_policy(const ScalePolicy& policy);

  /// The scale that the next scale() multiplies by; 1 if disabled.
  float get_scale() const;

  /// loss x scale, in FP32 whatever the type of the loss. Inf and nan go through. May be called
  /// several times before a step: several losses, or micro-batches whose gradients add up.
  float scale(float loss);
  float scale(f16 loss) { return scale(static_cast<float>(loss)); }
  float scale(bf16 loss) { return scale(static_cast<float>(loss)); }

  /// Divides the gradients of `optimizer` by the scale, in place, for those who clip or look at
  /// them by hand before step(). FP16 gradients that underflow again are counted in the result;
  /// StepOptions::max_norm clips without that loss. At most once between updates for each
  /// optimizer.
  UnscaleResult unscale_(Optimizer& optimizer);

  /// Measures, decides, and applies or skips. A skipped step changes no weight, no state and no
  /// step count. Gradients are checked even after unscale_, so that inf or nan that came in since
  /// then does no harm. With OnOverflow::kThrow a bad step is skipped and then reported by
  /// Error(kOverflow). At most once between updates for each optimizer, and only if at least one of
  /// its parameters has a gradient.
  StepReport step(Optimizer& optimizer, const StepOptions& options = {});

  /// Moves the scale by what the steps since the last update found, and opens the next round.
  /// Gradients that still wait under an optimizer that was stepped before (micro-batches that go on
  /// over this update) are rescaled in place, so that what is added to them later fits.
  void update();

  /// Sets the scale by hand and opens the next round. Growth starts counting again. Throws,
  /// changing nothing, if the policy's bounds forbid it, or if losses were scaled that no step has
  /// used yet.
  void update(float new_scale);

  /// Forgets losses that were scaled but not stepped, because their gradients are dropped: zeroed,
  /// or overwritten by the next backward.
  void discard();

  /// All that changes: exact, as plain numbers.
  const ScaleState& state() const { return state_; }

  /// Takes over a state, and opens the next round. Throws, changing nothing: Error(kBadState) if a
  /// value is impossible under this policy, Error(kWrongOrder) if losses wait (see discard()).
  void load_state(const ScaleState& state);

  /// Policy and state as JSON text, every number exact; and back. save() belongs after update(): in
  /// the middle of a round it throws. Missing, unknown or impossible values make load() throw
  /// Error(kBadState) and change nothing.
  std::string save() const;
  void load(std::string_view json);

 private:
  enum class Stage : uint8_t { kReady, kUnscaled, kStepped };

  // An optimizer that was stepped or unscaled before. It lives as long as `identity` does.
  struct Known {
    std::weak_ptr<internal::OptimizerIdentity> identity;
    uint64_t revision = 0;           // of `memory`
    std::vector<TensorView> memory;  // its weights and gradients, sorted by address
    Stage stage = Stage::kReady;     // in round `round`
    int64_t round = -1;
    int64_t losses = 0;     // losses scaled so far when its gradients were last used
    float scale = 0.0f;     // that its gradients in memory have, if no loss came since the update
    bool overflow = false;  // found by unscale_
    double amax = 0.0;      // of its gradients in this round, scaled
    std::string culprit;
  };

  Known& enter(const Optimizer& optimizer, const char* call);
  Known& know(const Optimizer& optimizer);
  void record(bool overflow, const std::string& culprit, Known* known);
  void move_to(const ScaleState& next);
  void check_no_waiting(const char* call) const;
  void raise(Alarm alarm) const;

  ScalePolicy policy_;
  ScalerOptions options_;
  ScaleState state_;
  float used_scale_ = 0.0f;    // of the last scale(); 0 before the first
  int64_t round_ = 0;          // updates and loads so far
  int64_t losses_ = 0;         // scale() calls so far,
  int64_t losses_before_ = 0;  // of which before this round,
  int64_t losses_used_ = 0;    // and before the last step or unscale_
  bool recorded_ = false;      // a check was made in this round
  StepSeen seen_;              // and what they found
  std::string culprit_;
  std::map<uint64_t, Known> known_;
};

}  // namespace headroom

#endif  // HEADROOM_SCALER_H_
