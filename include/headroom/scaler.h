// scaler: the front door. GradScaler walks the stations in order (measure, agree, decide, apply),
// keeps the scale, and refuses calls that come at the wrong moment.
#ifndef HEADROOM_SCALER_H_
#define HEADROOM_SCALER_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <headroom/measure.h>
#include <headroom/optimizer.h>
#include <headroom/policy.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

namespace internal {
class CudaOptimizer;
class CudaScaler;
struct CudaOrder;
struct CudaRanks;
struct Stand;
}  // namespace internal

enum class ClearGrads : uint8_t {
  kOnSkip,  // zero the gradients of a skipped step, leave them after an applied one
  kAlways,  // zero them after every step, in the same pass over memory
  kNever,
};

struct StepOptions {
  /// Clip so that the L2 norm of the unscaled gradients is at most this. 0: no clipping.
  float max_norm = 0.0f;
  ClearGrads clear_grads = ClearGrads::kOnSkip;

  /// For a disabled scaler without ranks, where somebody else (a framework's own scaler) keeps the
  /// scale: numbers on this scaler's device, used when the step gets there. The gradients are
  /// divided by
  /// `*outside_scale`. The step is skipped if `*outside_found` is not 0, if the gradients are bad
  /// or if the scale is not a usable number; `*tell_skipped` becomes 1 if it is skipped, else 0.
  const float* outside_scale = nullptr;
  const float* outside_found = nullptr;
  float* tell_skipped = nullptr;
};

/// What one step did.
struct StepReport {
  /// The step was enqueued on a CUDA device and the rest of this report is empty: ask the scaler's
  /// report() or try_report() for it.
  bool pending = false;

  bool applied = false;
  Skip skip = Skip::kNo;     // why not
  float scale = 1.0f;        // the scale these gradients were made with
  double grad_norm = 0.0;    // L2 norm of the unscaled gradients before clipping; inf or nan if bad
  double clip_factor = 1.0;  // what clipping multiplied by
  GradStats stats;           // of the gradients in memory: scaled, or unscaled after unscale_;
                             // with ScalerOptions::ranks: of all ranks
  std::string culprit;       // the first bad tensor: "embed.weight: 3 inf, 0 nan"; empty if none
  int culprit_rank = -1;     // with ScalerOptions::ranks: the first rank with a bad tensor
  int64_t steps = 0;         // of this optimizer under this scaler so far, this one included,
  int64_t skipped = 0;       // of which skipped

  /// One line for a log: "skipped at scale 65536: embed.weight: 3 inf, 0 nan". A pending report
  /// says that its result is not known yet.
  HEADROOM_API std::string to_string() const;
};

/// Training is in trouble: told to ScalerOptions::on_alarm, or thrown.
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
  /// unscale_(), step() and update() enqueue on the current stream (StreamScope) and return, and
  /// may be captured in a CUDA graph. All gradients have to be on that device.
  Device device = {};

  /// The ranks that train together; null: this process is alone. All of them then make the same
  /// calls with the same settings: scale() in every round (a rank without a loss: of 0), unscale_()
  /// and step() of each optimizer (on a rank that has no gradients, too), update(). step() and
  /// unscale_() wait for all ranks and throw Error(kRankLost) if one does not come, or
  /// Error(kRanksDiffer) if they do not fit together; the weights are then as before.
  /// docs/scaling.md
  std::shared_ptr<Ranks> ranks = nullptr;
  RankGradients gradients = RankGradients::kReplicated;

  /// Called at the end of update() when an overflow finds the scale at its floor, or when
  /// max_skips_in_row is reached. Without it update() throws Error(kScaleCollapsed) instead. Either
  /// way update() has done its work, and training may go on. Of a scaler on a CUDA device it comes
  /// from the first update(), report() or try_report() that can know.
  std::function<void(const AlarmReport&)> on_alarm = nullptr;
};

/// Scales losses, unscales gradients, skips bad steps, adapts the scale: torch.amp.GradScaler's
/// rules of use, for any C++ training loop.
///
///     scaled = scaler.scale(loss);            // then backward
///     report = scaler.step(optimizer);        // once for each optimizer
///     scaler.update();                        // once, after all of them
///
/// One thread at a time may use a GradScaler and the optimizers it has stepped. Of one on the CPU,
/// any number of threads may ask (get_scale(), state(), policy(), save()) while none changes it.
///
/// With ScalerOptions::device on a CUDA device the same calls never wait:
///
///     GradScaler scaler(DynamicScale{}, {.device = {DeviceType::kCUDA, 0}});
///     scaler.scale(loss, scaled);             // tensors; then backward
///     scaler.step(optimizer);                 // SGD, Adam, AdamW: verdict and update there
///     scaler.update();
///     if (auto report = scaler.try_report()) ...   // the newest step that is done
///
/// The first step takes memory and the following ones none; a graph may be captured after it.
/// Replays change the device's state, which all that waits (state(), get_scale(), report(), save())
/// then tells. Optimizers that are not SGD, Adam or AdamW wait for the verdict in each step.
class HEADROOM_API GradScaler {
 public:
  /// Throws Error(kInvalidArgument) if a setting is impossible.
  explicit GradScaler(const ScalePolicy& policy = DynamicScale{}, ScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  bool enabled() const { return options_.enabled; }
  const ScalePolicy& policy() const { return policy_; }

  /// Changes how the scale moves from now on; the scale stays, and so do all counts that are still
  /// possible (a shorter growth_interval may end with the next clean step). Throws
  /// Error(kInvalidArgument), changing nothing, if a setting is impossible or the new bounds forbid
  /// the present scale.
  void set_policy(const ScalePolicy& policy);

  /// The scale that the next scale() multiplies by; 1 if disabled. Waits for a CUDA device, like
  /// everything that tells or changes the state by hand.
  float get_scale() const;

  /// loss x scale, in FP32 whatever the type of the loss. Inf and nan go through. May be called
  /// several times before a step: several losses, or micro-batches whose gradients add up.
  float scale(float loss);
  float scale(f16 loss) { return scale(static_cast<float>(loss)); }
  float scale(bf16 loss) { return scale(static_cast<float>(loss)); }

  /// The same for tensors: scaled = loss x scale. `scaled` is f32 and may be the loss's own memory.
  /// The only scale() of a scaler on a CUDA device.
  void scale(const TensorView& loss, const TensorView& scaled);

  /// Divides the gradients of `optimizer` by the scale, in place, for those who clip or look at
  /// them by hand before step(). FP16 gradients that underflow again are counted in the result;
  /// StepOptions::max_norm clips without that loss. At most once between updates for each
  /// optimizer, and no backward may add to them before step(); without a step, update() multiplies
  /// them by the scale again. On a CUDA device the result is empty; the step's report tells. With
  /// ranks the result is that of all of them, and the gradients are unscaled even if
  /// Error(kRankLost) or Error(kRanksDiffer) is thrown.
  UnscaleResult unscale_(Optimizer& optimizer);

  /// Measures, decides, and applies or skips. A skipped step changes no weight, no state and no
  /// step count. Gradients are checked even after unscale_, so that inf or nan that came in since
  /// then does no harm. With OnOverflow::kThrow a bad step is skipped and then reported by
  /// Error(kOverflow). At most once between updates for each optimizer, and only if at least one of
  /// its parameters has a gradient (with ranks: on any of them).
  StepReport step(Optimizer& optimizer, const StepOptions& options = {});

  /// What the last step() did, of all or of one optimizer: waits for it, or takes the newest that
  /// is done, if any. A scaler on the CPU has it at once.
  StepReport report() const;
  StepReport report(const Optimizer& optimizer) const;
  std::optional<StepReport> try_report() const;
  std::optional<StepReport> try_report(const Optimizer& optimizer) const;

  /// Updates, and scales set or loaded by hand, so far.
  int64_t rounds() const { return round_; }

  /// Moves the scale by what the steps since the last update found, and opens the next round.
  /// Gradients that still wait under an optimizer that was stepped before (micro-batches that go on
  /// over this update) are rescaled in place, so that what is added to them later fits.
  void update();

  /// Sets the scale by hand and opens the next round. Growth starts counting again. Throws,
  /// changing nothing, if the policy's bounds forbid it, or if losses were scaled that no step has
  /// used yet.
  void update(float new_scale);

  /// After update(), with a policy whose `rerun` is set: whether to run the last batch again,
  /// because it was skipped and the scale is lower now for its sake. False for one that no scale
  /// helps.
  ///
  ///     do { backward(scaler.scale(loss)); scaler.step(optimizer); scaler.update(); }
  ///     while (scaler.run_again());
  ///
  /// With such a policy step() throws Error(kUnsupported) for a second optimizer in one round, and
  /// for a GradAccumulator.
  bool run_again() const { return enabled() && headroom::run_again(policy_, state()); }

  /// Forgets losses that were scaled but not stepped, because their gradients are dropped: zeroed,
  /// or overwritten by the next backward.
  void discard();

  /// For faces of this scaler that see more of the backward passes than scale() does: all gradients
  /// that wait are under optimizers that were seen before, and follow a scale that is set or
  /// loaded.
  void assume_known();

  /// For them, too: gradients came in after the last step, of a loss that was scaled before it.
  void more_gradients();

  /// All that changes: exact, as plain numbers.
  const ScaleState& state() const;

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
    int64_t losses = 0;     // losses scaled so far when its gradients were last used; -1: they wait
    float scale = 0.0f;     // that its gradients in memory have, if no loss came since the update
    bool overflow = false;  // found by unscale_
    double amax = 0.0;      // of its gradients in this round, scaled
    std::string culprit;
    int culprit_rank = -1;
    int64_t ordinal = 0;  // how many were met before it
    double names = 0.0;   // a fingerprint of its parameters' names and sizes,
    uint64_t named = 0;   // of this revision
    StepReport report;    // of the last step
    std::shared_ptr<internal::CudaOptimizer> cuda;
    uint64_t listed = 0;  // the revision whose gradients the device has a list of
    bool first = true;    // since the device last heard: seen for the first time,
    bool fresh = true;    // in a new round

    // Forgets what was found in the round before.
    void begin(int64_t new_round) {
      stage = Stage::kReady;
      round = new_round;
      overflow = false;
      amax = 0.0;
      culprit.clear();
      culprit_rank = -1;
      fresh = true;
    }

    // Its gradients wait for the next round, with this scale.
    void goes_on(float new_scale) {
      scale = new_scale;
      stage = Stage::kReady;
      losses = -1;
    }
  };
  enum class Waiting : uint8_t { kNone, kScaled, kUnscaled };

  static uint64_t id_of(const Optimizer& optimizer);
  static bool has_gradient(const Optimizer& optimizer);
  static bool beyond_its_format(const Optimizer& optimizer, const StepOptions& options,
                                float scale);
  Known& enter(const Optimizer& optimizer, const char* call);
  Known& meet(const Optimizer& optimizer);
  Known& know(const Optimizer& optimizer);
  Known& enter_step(const Optimizer& optimizer, const StepOptions& options);
  void check_rerun(const Optimizer& optimizer) const;
  void record(bool overflow, const std::string& culprit, Known* known);

  // What was found in the gradients of an optimizer, by all ranks if there are several.
  struct Finding {
    GradStats stats;
    int64_t new_inf = 0;
    int64_t new_zeros = 0;
    std::string culprit;
    int culprit_rank = -1;
    bool any = true;  // there are gradients
  };
  Finding agree(const Optimizer& optimizer, Known* known, const StepOptions* step, Finding mine);
  internal::Stand stand(const Optimizer& optimizer, Known* known, const StepOptions* step) const;
  std::string culprit_text(const GradStats& stats, int rank, bool same_list,
                           const std::vector<Parameter>& parameters) const;
  StepReport conclude(Optimizer& optimizer, const StepOptions& options, const Verdict& verdict,
                      Finding found, Known* known);
  friend class GradAccumulator;
  StepReport skip(Optimizer& optimizer, const StepOptions& options, const std::string& culprit);
  void check(const ScalePolicy& policy) const;
  void check_ranks() const;
  void move_to(const ScaleState& next);
  void check_no_waiting(const char* call) const;
  Waiting waiting(const Known& known) const;
  void raise(Alarm alarm, float scale, int64_t skips_in_row, const std::string& culprit) const;

  // The side of a scaler on a CUDA device (on_device.cc).
  void enqueue_list(const Optimizer& optimizer, Known* known) const;
  internal::CudaOrder order(Known* known) const;
  internal::CudaRanks ranks(const Optimizer& optimizer, Known* known,
                            const StepOptions* step) const;
  StepReport step_on_device(Optimizer& optimizer, const StepOptions& options, Known* known);
  void update_on_device();
  std::optional<StepReport> report_from_device(const Known& known) const;
  std::optional<StepReport> report_of(uint64_t optimizer, bool wait) const;
  void tell_alarms() const;
  void next_round();

  ScalePolicy policy_;
  ScalerOptions options_;
  mutable ScaleState state_;                    // with a device: as it was when last asked for
  std::shared_ptr<internal::CudaScaler> cuda_;  // on the CPU: null
  mutable uint64_t alarms_told_ = 0;
  mutable uint64_t differences_told_ = 0;
  uint64_t last_stepped_ = 0;  // the optimizer
  float used_scale_ = 0.0f;    // of the last scale(); 0 before the first
  int64_t round_ = 0;          // updates and loads so far
  int64_t messages_ = 0;       // to the other ranks so far
  int64_t met_ = 0;            // optimizers so far
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
