// scaler/ drives the stages in order: measure, agree, decide, apply. It must not know about kernels
// or SIMD. This header is the private part of GradScaler.
#ifndef HEADROOM_SRC_SCALER_SCALER_H_
#define HEADROOM_SRC_SCALER_SCALER_H_

#include <headroom/scaler.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "agree/agree.h"
#include "apply/record.h"
#include "decide/call_order.h"
#include "decide/transition.h"
#include "decide/verdict.h"
#include "scaler/cuda.h"

namespace headroom::internal {

/// What a scaler stores about an optimizer that was stepped or unscaled before. The revisions are
/// those of OptimizerRecord; each says for which state of the parameters a cached value is valid.
struct OptimizerEntry {
  std::weak_ptr<OptimizerRecord> record;
  int64_t ordinal = 0;  // position in the order of first use; equal on all ranks
  uint64_t checked_revision = 0;
  std::vector<TensorView> memory;  // all arrays, sorted by address
  uint64_t names_revision = 0;
  double names = 0.0;            // fingerprint of the names and sizes
  StepReport report;             // of the last step
  bool had_gradients = false;    // in the last unscale_()
  GradStats unscaled;            // result of the last unscale_(), if its gradients are unscaled
  std::string unscaled_culprit;  // not empty if that result was bad
  StepNumbers numbers = {};      // on a CUDA device those in `cuda` are valid
  std::shared_ptr<CudaOptimizer> cuda;
  uint64_t listed_revision = 0;  // of the list of gradients on the device
};

/// Gradients of an optimizer that wait for a later step.
struct WaitingGradients {
  OptimizerEntry* entry;
  std::shared_ptr<OptimizerRecord> record;
  bool unscaled;
  std::vector<TensorView> gradients;  // an empty view for one that another optimizer lists
};

/// What was measured in the gradients of an optimizer, over all ranks.
struct CombinedStats {
  GradStats stats;
  std::string culprit;
  bool any = true;  // there are gradients
};

/// The implementation of GradScaler. The public class and the bindings' ScalerAccess are thin
/// layers over it, so its members are public to them.
class Scaler {
 public:
  Scaler(const ScalePolicy& policy, ScalerOptions options);

  bool on_device() const { return cuda != nullptr; }

  /// The current numbers; waits for a CUDA device.
  ScaleNumbers numbers() const;

  /// Throws Error(kInvalidArgument) unless the policy is valid and works on this scaler's device.
  void check_policy(const ScalePolicy& policy) const;

  /// Throws Error(kWrongOrder) for a refusal.
  static void allow(CallOrder::Refusal refusal, const char* call);

  /// The entry of an optimizer whose parameters were refreshed, which is added if it is new.
  /// Throws if another optimizer under this scaler shares memory with them.
  OptimizerEntry& find_or_add(Optimizer& optimizer);

  static uint64_t id_of(const Optimizer& optimizer);
  static bool has_gradient(const Optimizer& optimizer);

  /// Refreshes the optimizer's parameters, checks that step() may be called with these options now,
  /// and returns the optimizer's entry.
  OptimizerEntry& begin_step(Optimizer& optimizer, const StepOptions& options);
  StepReport step(Optimizer& optimizer, const StepOptions& options, const ExternalScale& external);

  /// Skips a step whose gradients are known to be bad.
  StepReport skip(Optimizer& optimizer, const StepOptions& options, const std::string& culprit);

  void update();

  /// Replaces policy and state by those that were set or loaded by the user, and begins the next
  /// round. Throws Error(kWrongOrder), changing nothing, while gradients wait for a step.
  void replace(const ScaleRecord& next, const char* call);

  /// See ScalerAccess::set_ranks().
  void set_ranks(std::shared_ptr<Ranks> ranks, RankGradients gradients);

  /// Throws Error(kMismatch) unless the loss is on the CUDA device of the scale.
  void check_on_device(const TensorView& loss) const;

  /// Copies the state from the CUDA device, for gradients that are on several devices. Waits.
  void move_to_host();

  std::optional<StepReport> report_of(uint64_t optimizer, bool wait) const;

  /// Combines this rank's result with those of the other ranks; waits for them (ranks.cc). `step`
  /// is null in unscale_().
  CombinedStats agree(const Optimizer& optimizer, OptimizerEntry* entry, const StepOptions* step,
                      const GradStats& mine);

  /// Adds the result of one optimizer to the input of the next update().
  void see(bool overflow, double amax, const std::string& culprit);

  /// Uploads the list of gradients if it has changed (device.cc).
  void list_gradients(const Optimizer& optimizer, OptimizerEntry* entry) const;
  CudaRanks cuda_ranks(const Optimizer& optimizer, OptimizerEntry* entry,
                       const StepOptions* step) const;

  ScalerOptions options;
  ScaleRecord record;  // its numbers are outdated if `cuda` is not null
  CallOrder order;
  std::shared_ptr<CudaScaler> cuda;  // null on the CPU
  std::map<uint64_t, OptimizerEntry> optimizers;
  uint64_t last_stepped = 0;

 private:
  StepReport finish_step(Optimizer& optimizer, const StepOptions& options, const Verdict& verdict,
                         float scale, CombinedStats found, OptimizerEntry* entry);
  static bool overflows_in_place(const Optimizer& optimizer, const StepOptions& options,
                                 float scale);
  std::vector<WaitingGradients> waiting_gradients();
  void end_round(const std::vector<WaitingGradients>& waiting, float from, float to);
  void raise(Alarm alarm, float scale, int64_t skips_in_row, const std::string& culprit) const;

  // Ranks (ranks.cc).
  void check_ranks() const;
  RankStatus rank_status(const Optimizer& optimizer, OptimizerEntry* entry,
                         const StepOptions* step) const;
  std::string culprit_text(const GradStats& stats, bool same_names,
                           const std::vector<Parameter>& parameters) const;

  // CUDA devices (device.cc).
  StepReport step_on_device(Optimizer& optimizer, const StepOptions& options,
                            const ExternalScale& external, OptimizerEntry* entry);
  StepReport wait_and_apply(Optimizer& optimizer, const StepOptions& options, bool unscaled,
                            OptimizerEntry* entry);
  std::optional<StepReport> report_from_device(const OptimizerEntry& entry) const;
  void raise_device_alarms() const;

  StepSeen seen_;         // input of the next update
  std::string culprit_;   // of the last overflow
  int64_t messages_ = 0;  // sent to the other ranks so far
  int64_t optimizers_seen_ = 0;
  mutable uint64_t alarms_raised_ = 0;
  mutable uint64_t differences_raised_ = 0;
};

/// Access for the bindings in this repository, beyond GradScaler's public interface.
struct HEADROOM_API ScalerAccess {
  /// The factor for a loss that the binding multiplies itself. gradients_added() has to be called
  /// once its backward has run. The second form writes the factor to a tensor on the device.
  static float begin_loss(GradScaler& scaler);
  static void begin_loss(GradScaler& scaler, const TensorView& one, const TensorView& factor);
  /// The same, for a binding that reads the factor at scale_address().
  static void loss_scaled(GradScaler& scaler);
  /// From now on a loss is assumed in every round: scale() was captured in a CUDA graph, whose
  /// replays the host does not see.
  static void assume_losses(GradScaler& scaler);
  static int64_t round(const GradScaler& scaler);

  /// Reports that backward of a loss that was scaled in `round` has added to the gradients. Throws
  /// Error(kWrongOrder) if the scale may have changed since.
  static void gradients_added(GradScaler& scaler, int64_t round);

  /// A step with a scale that a framework's own scaler maintains. The scaler has to be disabled and
  /// without ranks.
  static StepReport step(GradScaler& scaler, Optimizer& optimizer, const StepOptions& options,
                         const ExternalScale& external);

  /// set_scale() and load_state(); `call` is the name of the function in error messages.
  static void set_scale(GradScaler& scaler, float scale, const char* call);
  static void set_record(GradScaler& scaler, const ScaleRecord& record, const char* call);

  /// Ranks that are known only once the first optimizer is. Throws Error(kWrongOrder) after the
  /// first message.
  static void set_ranks(GradScaler& scaler, std::shared_ptr<Ranks> ranks, RankGradients gradients);

  static bool is_unscaled(const GradScaler& scaler, const Optimizer& optimizer);
  static void move_to_host(GradScaler& scaler);

  /// Where the scale is, on the host or on the scaler's CUDA device; what the optimizer's last
  /// step found, there too, or null before its first.
  static float* scale_address(GradScaler& scaler);
  static StepNumbers* numbers_of(GradScaler& scaler, const Optimizer& optimizer);

  static StepReport skip(GradScaler& scaler, Optimizer& optimizer, const StepOptions& options,
                         const std::string& culprit);
};

/// The gradients that this rank counts, or the copies that another one does. The others are empty
/// in the list, so that indices stay.
std::vector<TensorView> gradients_of(const Optimizer& optimizer, bool counted = true);
bool has_copies(const Optimizer& optimizer);

/// Reads all gradients; with a factor other than 1 also multiplies them by it, in place.
GradStats measure_gradients(const Optimizer& optimizer, float factor = 1.0f);

/// The report of a verdict, still without culprit and counts.
StepReport make_report(const Verdict& verdict, const GradStats& stats, float scale);

/// Calls apply() or skipped(), as the report says, and clears the gradients as the options say.
void apply_or_skip(Optimizer& optimizer, const StepOptions& options, const StepReport& report,
                   float multiplier);

/// "1 to 65536", for error messages.
HEADROOM_API std::string allowed_scales(const ScalePolicy& policy);

/// The report on an alarm, with its sentence.
HEADROOM_API AlarmReport alarm_report(const ScalePolicy& policy, Alarm alarm, float scale,
                                      int64_t skips_in_row, const std::string& culprit);

/// Why gradients up to `amax` cannot be divided by `scale`; in place: in FP16.
std::string describe_unscaling(double amax, float scale);
std::string describe_unscaling_in_place(double amax, float scale);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_SCALER_SCALER_H_
