// CallOrder is the only implementation of the rules of call order. Its input are events; its
// results are "allowed", "refused because ..." or "rescale these gradients". It must not know about
// tensors, threads or devices; an optimizer is a number.
//
// A round begins with the construction, with an update or with a scale set by the user, and ends
// with the next of these. Within a round, losses are scaled, and each optimizer may be unscaled
// once and stepped once.
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
    kGradientsWaiting,  // setting the scale while gradients of the old scale wait for a step
    kStepNotCounted,    // save() between step() and update()
  };

  /// Gradients that wait for a later step when the scale changes. They have to be multiplied by
  /// new scale / old scale, or by the new scale if they are unscaled.
  struct Rescale {
    uint64_t optimizer;
    bool unscaled;
  };

  /// Events that are always allowed: a loss was scaled; its backward has added to the gradients of
  /// some optimizers; the user has dropped all waiting gradients; an optimizer was destroyed.
  void loss_scaled() { loss_scaled_ = true; }
  void gradients_added();
  void discard();
  void forget(uint64_t optimizer) { optimizers_.erase(optimizer); }

  /// From now on the first step or unscale_ of each round assumes that a backward has run, because
  /// losses are scaled where the host does not see it. Always allowed.
  void assume_losses() { assumes_losses_ = true; }

  /// Whether a call is allowed now. `one_optimizer_only`: the policy retries batches.
  Refusal may_unscale(uint64_t optimizer) const;
  Refusal may_step(uint64_t optimizer, bool one_optimizer_only) const;
  Refusal may_update() const;
  Refusal may_set_scale() const;
  Refusal may_save() const;

  /// An allowed call was made. `checked`: it has read gradients, so that update() can decide.
  void unscaled(uint64_t optimizer, bool checked);
  void stepped(uint64_t optimizer);

  /// The gradients that have to be rescaled if the round ends now, unscaled ones first: if another
  /// optimizer shares them, its entry does not show that they are unscaled.
  std::vector<Rescale> rescales() const;
  void end_round();

  /// Whether the gradients of this optimizer were unscaled in this round and not yet stepped.
  bool is_unscaled(uint64_t optimizer) const;

  /// Whether it was unscaled or stepped in this round.
  bool is_used(uint64_t optimizer) const;

  int64_t round() const { return round_; }

 private:
  enum class Stage : uint8_t { kReady, kUnscaled, kStepped };
  struct Progress {
    Stage stage = Stage::kReady;  // in this round
    bool waiting = false;         // gradients were added since its last step or unscale_
  };
  Progress progress_of(uint64_t optimizer) const;
  bool has_loss(const Progress& progress) const;
  void use(uint64_t optimizer, Stage stage);

  std::map<uint64_t, Progress> optimizers_;
  int64_t round_ = 0;
  bool assumes_losses_ = false;
  bool loss_assumed_ = false;      // in this round
  bool loss_scaled_ = false;       // in this round
  bool checked_ = false;           // an optimizer was stepped or unscaled in this round
  bool gradients_unused_ = false;  // gradients were added since any step or unscale_
};

/// The error message of a refusal. `call` is the function that was called, such as "step()".
std::string refusal_sentence(CallOrder::Refusal refusal, const std::string& call);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DECIDE_CALL_ORDER_H_
