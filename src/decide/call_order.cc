// The rules of call order. docs/scaling.md describes them for users.
#include "decide/call_order.h"

#include <algorithm>

namespace headroom::internal {

using Refusal = CallOrder::Refusal;

// An optimizer that was never stepped or unscaled is in its initial state.
CallOrder::Progress CallOrder::progress_of(uint64_t optimizer) const {
  const auto found = optimizers_.find(optimizer);
  return found != optimizers_.end() ? found->second : Progress{};
}

bool CallOrder::is_unscaled(uint64_t optimizer) const {
  return progress_of(optimizer).stage == Stage::kUnscaled;
}

bool CallOrder::is_used(uint64_t optimizer) const {
  return progress_of(optimizer).stage != Stage::kReady;
}

// A loss may add to the gradients of every optimizer.
void CallOrder::gradients_added() {
  loss_scaled_ = true;
  gradients_unused_ = true;
  for (auto& [id, progress] : optimizers_) progress.waiting = true;
}

// Gradients that were unscaled are dropped as well and may be unscaled again.
void CallOrder::discard() {
  loss_scaled_ = false;
  loss_assumed_ = false;
  gradients_unused_ = false;
  for (auto& [id, progress] : optimizers_) {
    progress.waiting = false;
    if (progress.stage == Stage::kUnscaled) progress.stage = Stage::kReady;
  }
}

bool CallOrder::has_loss(const Progress& progress) const {
  return loss_scaled_ || progress.waiting || assumes_losses_;
}

Refusal CallOrder::may_unscale(uint64_t optimizer) const {
  const Progress progress = progress_of(optimizer);
  if (progress.stage == Stage::kStepped) return Refusal::kAlreadyStepped;
  if (progress.stage == Stage::kUnscaled) return Refusal::kAlreadyUnscaled;
  return has_loss(progress) ? Refusal::kNone : Refusal::kNothingScaled;
}

// Under a policy that retries batches a second optimizer is refused: if one overflows and the other
// does not, the retried batch would step the other one twice.
Refusal CallOrder::may_step(uint64_t optimizer, bool one_optimizer_only) const {
  const Progress progress = progress_of(optimizer);
  if (progress.stage == Stage::kStepped) return Refusal::kAlreadyStepped;
  if (progress.stage == Stage::kReady && !has_loss(progress)) return Refusal::kNothingScaled;
  const bool another = std::any_of(optimizers_.begin(), optimizers_.end(), [](const auto& other) {
    return other.second.stage == Stage::kStepped;
  });
  return one_optimizer_only && another ? Refusal::kSecondOptimizer : Refusal::kNone;
}

Refusal CallOrder::may_update() const {
  return checked_ ? Refusal::kNone : Refusal::kNothingStepped;
}

// Gradients in memory have the old scale. Those that were unscaled or stepped do not matter.
Refusal CallOrder::may_set_scale() const {
  return gradients_unused_ ? Refusal::kGradientsWaiting : Refusal::kNone;
}

Refusal CallOrder::may_save() const { return checked_ ? Refusal::kStepNotCounted : Refusal::kNone; }

// A loss is assumed once in a round, so that optimizers used earlier in it do not wait again.
// `loss_scaled_` stays set: other optimizers may still use gradients of the same loss.
void CallOrder::use(uint64_t optimizer, Stage stage) {
  if (assumes_losses_ && !loss_assumed_) {
    gradients_added();
    loss_assumed_ = true;
  }
  optimizers_[optimizer] = {stage, false};
}

void CallOrder::unscaled(uint64_t optimizer, bool checked) {
  use(optimizer, Stage::kUnscaled);
  if (!checked) return;
  checked_ = true;
  gradients_unused_ = false;
}

void CallOrder::stepped(uint64_t optimizer) {
  use(optimizer, Stage::kStepped);
  checked_ = true;
  gradients_unused_ = false;
}

// Optimizers that were stepped have consumed their gradients, unless more were added since.
std::vector<CallOrder::Rescale> CallOrder::rescales() const {
  std::vector<Rescale> list;
  for (const auto& [id, progress] : optimizers_) {
    const bool unscaled = progress.stage == Stage::kUnscaled;
    if (unscaled || progress.waiting) list.push_back({id, unscaled});
  }
  std::stable_partition(list.begin(), list.end(),
                        [](const Rescale& rescale) { return rescale.unscaled; });
  return list;
}

// Gradients that were unscaled but not stepped are rescaled by the caller and wait again.
void CallOrder::end_round() {
  for (auto& [id, progress] : optimizers_) {
    progress.waiting = progress.waiting || progress.stage == Stage::kUnscaled;
    progress.stage = Stage::kReady;
  }
  ++round_;
  loss_scaled_ = false;
  loss_assumed_ = false;
  checked_ = false;
}

std::string refusal_sentence(Refusal refusal, const std::string& call) {
  const std::string called = call + " was called ";
  switch (refusal) {
    case Refusal::kNothingScaled:
      return called +
             "before any scale() in this round; scale the loss, run backward on the result, then "
             "step.";
    case Refusal::kAlreadyUnscaled:
      return called +
             "twice for this optimizer, whose gradients are already unscaled; unscale once, just "
             "before clipping.";
    case Refusal::kAlreadyStepped:
      return called + "after step() for this optimizer; call update() first.";
    case Refusal::kSecondOptimizer:
      return called +
             "for a second optimizer in one round under a policy that retries batches, where the "
             "first would be stepped once more; put all parameters into one optimizer, or use the "
             "preset 'headroom'.";
    case Refusal::kNothingStepped:
      return called +
             "but no optimizer was stepped or unscaled since the last one; call step() first. With "
             "micro-batches, update once, after the step.";
    case Refusal::kGradientsWaiting:
      return called +
             "while gradients wait that were made with another scale; step first, or drop them and "
             "call discard().";
    case Refusal::kStepNotCounted:
      return called +
             "between step() and update(), when the result of the step is not part of the state "
             "yet; save after update().";
    case Refusal::kNone:
      break;
  }
  return "";
}

}  // namespace headroom::internal
