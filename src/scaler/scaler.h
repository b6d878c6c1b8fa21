// The private part of GradScaler.
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

/// An optimizer that was stepped or unscaled before.
struct OptimizerEntry {
  std::weak_ptr<OptimizerRecord> record;
  int64_t ordinal = 0;             // optimizers that the scaler has seen before it
  uint64_t checked_revision = 0;   // whose memory was compared with that of other optimizers:
  std::vector<TensorView> memory;  // its weights and gradients, sorted by address
  uint64_t names_revision = 0;     // whose names and sizes have this fingerprint:
  double names = 0.0;
  StepReport report;             // of the last step
  GradStats unscaled;            // found by the last unscale_, if its gradients are unscaled;
  std::string unscaled_culprit;  // not empty if that was bad
  StepNumbers numbers = {};      // on a CUDA device those in `cuda` count
  std::shared_ptr<CudaOptimizer> cuda;
  uint64_t listed_revision = 0;  // whose gradients the device has a list of
};

/// What was found in the gradients of an optimizer, by all ranks if there are several.
struct Finding {
  GradStats stats;
  std::string culprit;
  bool any = true;     // there are gradients
  float scale = 1.0f;  // that they were made with
};

class Scaler {
 public:
  Scaler(const ScalePolicy& policy, ScalerOptions options);

  bool on_device() const { return cuda != nullptr; }

  /// The numbers as they are now; waits for a CUDA device.
  ScaleNumbers numbers() const;

  /// Throws unless this scaler can follow the policy.
  void check_policy(const ScalePolicy& policy) const;

  /// Throws Error(kWrongOrder) for a refusal.
  static void allow(CallOrder::Refusal refusal, const char* call);

  /// The entry of an optimizer, made if it is new. The optimizer's parameters are refreshed, and no
  /// other optimizer under this scaler may share their memory.
  OptimizerEntry& enter(Optimizer& optimizer);

  static uint64_t id_of(const Optimizer& optimizer);
  static bool has_gradient(const Optimizer& optimizer);

  /// Throws unless step() may be called so, now.
  OptimizerEntry& enter_step(Optimizer& optimizer, const StepOptions& options);
  StepReport step(Optimizer& optimizer, const StepOptions& options, const ExternalScale& external);

  /// Skips a step whose gradients were found bad elsewhere.
  StepReport skip(Optimizer& optimizer, const StepOptions& options, const std::string& culprit);

  void update();

  /// Takes over a scale that was set or loaded by hand, and begins the next round.
  void replace(const ScaleRecord& next, const char* call);

  /// See ScalerAccess::set_ranks().
  void set_ranks(std::shared_ptr<Ranks> ranks, RankGradients gradients);

  /// Fetches the state from the CUDA device, for gradients that are in several places. Waits.
  void move_to_host();

  /// Losses may be scaled without notice: see GradScaler::device_scale().
  void assume_loss();

  std::optional<StepReport> report_of(uint64_t optimizer, bool wait) const;

  /// Combines what this rank found with the other ranks' results (ranks.cc). `step`: null in
  /// unscale_().
  Finding agree(const Optimizer& optimizer, OptimizerEntry* entry, const StepOptions* step,
                const GradStats& mine);

  /// Adds a result to what update() will decide by.
  void see(bool overflow, double amax, const std::string& culprit);

  /// Uploads the list of gradients, if it has changed; what the device needs to know of the ranks
  /// (device.cc).
  void list_gradients(const Optimizer& optimizer, OptimizerEntry* entry) const;
  CudaRanks cuda_ranks(const Optimizer& optimizer, OptimizerEntry* entry,
                       const StepOptions* step) const;

  ScalerOptions options;
  ScaleRecord record;  // on a CUDA device the numbers there count
  CallOrder order;
  bool losses_unseen = false;        // device_scale() was called
  std::shared_ptr<CudaScaler> cuda;  // null on the CPU
  std::map<uint64_t, OptimizerEntry> optimizers;
  uint64_t last_stepped = 0;

 private:
  StepReport conclude(Optimizer& optimizer, const StepOptions& options, const Verdict& verdict,
                      Finding found, OptimizerEntry* entry);
  static bool beyond_its_format(const Optimizer& optimizer, const StepOptions& options,
                                float scale);
  void prepare_rescales();
  void end_round(float from, float to);
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

  StepSeen seen_;         // in this round
  std::string culprit_;   // of the last overflow
  int64_t messages_ = 0;  // to the other ranks so far
  int64_t optimizers_seen_ = 0;
  mutable uint64_t alarms_raised_ = 0;
  mutable uint64_t differences_raised_ = 0;
};

/// What the bindings in this repository may do beyond GradScaler's public interface.
struct HEADROOM_API ScalerAccess {
  /// The scale as a factor for losses that are multiplied elsewhere. Backward has not run yet:
  /// gradients_added() is called when it has.
  static float begin_loss(GradScaler& scaler);
  static void begin_loss(GradScaler& scaler, const TensorView& one, const TensorView& factor,
                         Stream stream);
  /// The same, for a binding that reads the factor at scale_address().
  static void loss_scaled(GradScaler& scaler);
  static int64_t round(const GradScaler& scaler);

  /// Backward of a loss that was scaled in `round` has added to gradients. Throws
  /// Error(kWrongOrder) if the scale may have changed since.
  static void gradients_added(GradScaler& scaler, int64_t round);

  /// A step of a disabled scaler without ranks whose scale somebody else keeps.
  static StepReport step(GradScaler& scaler, Optimizer& optimizer, const StepOptions& options,
                         const ExternalScale& external);

  /// load_state(), with `call` for the sentence of a refusal.
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
std::vector<TensorView> grads_of(const Optimizer& optimizer, bool counted = true);
bool has_copies(const Optimizer& optimizer);

/// Reads all gradients; with a factor other than 1 also multiplies them by it, in place.
GradStats measure_gradients(const Optimizer& optimizer, float factor = 1.0f);

/// "1 to 65536", for sentences.
HEADROOM_API std::string allowed_scales(const ScalePolicy& policy);

/// Why gradients up to `amax` could not be divided by `scale`.
std::string describe_unscaling(double amax, float scale);
std::string describe_unscaling_in_place(double amax, float scale);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_SCALER_SCALER_H_
