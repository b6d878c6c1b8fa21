// Which call is legal when. CallOrder is the only implementation of the rules of call order: events
// go in, "allowed", "refused because ..." or "rescale these gradients" comes out. It knows neither
// tensors nor threads nor devices; an optimizer is a number.
//
// A round begins with the construction, an update or a scale set by hand, and ends with the next of
// these. In it losses are scaled, each optimizer may be unscaled once and stepped once, and one
// update ends it. docs/scaling.md has the rules for users.
#ifndef HEADROOM_SRC_DECIDE_CALL_ORDER_H_
#define HEADROOM_SRC_DECIDE_CALL_ORDER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace headroom::internal {

class CallOrder {
 public:
  /// Why a call is refused.
  enum class Refusal : uint8_t {
    kNone,              // it is allowed
    kNothingScaled,     // no loss was scaled for these gradients
    kAlreadyUnscaled,   // unscale_() twice in one round
    kAlreadyStepped,    // step() or unscale_() after step() in one round
    kSecondOptimizer,   // a second step in one round of a policy that retries batches
    kNothingStepped,    // update() without step() or unscale_()
    kGradientsWaiting,  // the scale is set while gradients of the old scale wait
    kStepNotCounted,    // save() between step() and update()
  };

  /// Gradients that wait for a later step when the scale changes: they have to be multiplied by the
  /// new scale over the old one, or by the new scale if they are unscaled.
  struct Rescale {
    uint64_t optimizer;
    bool unscaled;
  };

  /// Events that are always allowed. A loss was scaled; its backward has added to gradients, of
  /// whichever optimizers; all waiting gradients are dropped; an optimizer is gone.
  void loss_scaled() { loss_scaled_ = true; }
  void gradients_added();
  void discard();
  void forget(uint64_t optimizer) { optimizers_.erase(optimizer); }

  /// Whether a call may be made. Nothing changes.
  Refusal may_unscale(uint64_t optimizer) const;
  Refusal may_step(uint64_t optimizer, bool one_optimizer_only) const;
  Refusal may_update() const;
  Refusal may_set_scale() const;
  Refusal may_save() const;

  /// A call that was allowed has been made. `checked`: it looked at gradients, so that there is
  /// something to update by.
  void unscaled(uint64_t optimizer, bool checked);
  void stepped(uint64_t optimizer);

  /// The gradients that have to be rescaled if the round ends now.
  std::vector<Rescale> rescales() const;

  /// The round ends, with an update or a scale set by hand.
  void end_round();

  /// Whether the gradients of this optimizer were unscaled in this round and not stepped yet.
  bool is_unscaled(uint64_t optimizer) const;

  /// Whether it was unscaled or stepped in this round.
  bool is_used(uint64_t optimizer) const;

  int64_t round() const { return round_; }

 private:
  enum class Stage : uint8_t { kReady, kUnscaled, kStepped };
  struct OptimizerRecord {
    Stage stage = Stage::kReady;  // in this round
    bool waiting = false;         // gradients were added since its last step or unscale_
  };
  OptimizerRecord record_of(uint64_t optimizer) const;

  std::map<uint64_t, OptimizerRecord> optimizers_;
  int64_t round_ = 0;
  bool loss_scaled_ = false;       // in this round
  bool checked_ = false;           // an optimizer was stepped or unscaled in this round
  bool gradients_unused_ = false;  // gradients were added since any step or unscale_
};

/// The sentence of a refusal; `call` is the function that was called, such as "step()".
std::string refusal_sentence(CallOrder::Refusal refusal, const std::string& call);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DECIDE_CALL_ORDER_H_
