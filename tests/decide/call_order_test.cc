// The rules of call order against a model that knows no state: it reads the whole history of calls
// each time. All sequences up to six calls, and a million random longer ones. Beside the answers
// the values are checked: a step that is allowed divides the true sum of its gradients.
#include "decide/call_order.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace headroom::internal {
namespace {

using Refusal = CallOrder::Refusal;

enum class Event : uint8_t {
  kLoss,   // a loss is scaled, and its backward does not run
  kGrads,  // a loss is scaled, and backward adds to all gradients
  kUnscale0,
  kUnscale1,
  kStep0,
  kStep1,
  kUpdate,
  kSetScale,
  kSave,
  kDiscard,
  kForget0,
  kCount
};

int optimizer_of(Event event) {
  return event == Event::kUnscale1 || event == Event::kStep1 ? 1 : 0;
}
bool is_use(Event event) { return event >= Event::kUnscale0 && event <= Event::kStep1; }
bool is_unscale(Event event) { return event == Event::kUnscale0 || event == Event::kUnscale1; }
bool is_step(Event event) { return event == Event::kStep0 || event == Event::kStep1; }
bool ends_round(Event event) { return event == Event::kUpdate || event == Event::kSetScale; }

// Answers from the history of the calls that were allowed.
class Model {
 public:
  explicit Model(const std::vector<Event>& history) : history_(history) {}

  Refusal answer(Event event) const {
    const int optimizer = optimizer_of(event);
    if (is_use(event)) {
      if (used_in_round(optimizer, is_step)) return Refusal::kAlreadyStepped;
      if (unscaled(optimizer)) {
        return is_step(event) ? Refusal::kNone : Refusal::kAlreadyUnscaled;
      }
      return loss_in_round() || waiting(optimizer) ? Refusal::kNone : Refusal::kNothingScaled;
    }
    if (event == Event::kUpdate) {
      return used_in_round(-1, is_use) ? Refusal::kNone : Refusal::kNothingStepped;
    }
    if (event == Event::kSave) {
      return used_in_round(-1, is_use) ? Refusal::kStepNotCounted : Refusal::kNone;
    }
    if (event == Event::kSetScale) return unused() ? Refusal::kGradientsWaiting : Refusal::kNone;
    return Refusal::kNone;
  }

  bool unscaled(int optimizer) const {
    for (size_t i = history_.size(); i-- > 0;) {
      const Event event = history_[i];
      if (ends_round(event) || event == Event::kDiscard) return false;
      if (event == Event::kForget0 && optimizer == 0) return false;
      if (is_use(event) && optimizer_of(event) == optimizer) return is_unscale(event);
    }
    return false;
  }

  // Gradients came since its last use, or were unscaled when a round ended.
  bool waiting(int optimizer) const {
    bool grads = false, round_ended = false;
    for (size_t i = history_.size(); i-- > 0;) {
      const Event event = history_[i];
      if (event == Event::kForget0 && optimizer == 0) return false;
      if (event == Event::kDiscard) return grads && known(optimizer);
      if (is_use(event) && optimizer_of(event) == optimizer) {
        return grads || (round_ended && is_unscale(event));
      }
      grads = grads || event == Event::kGrads;
      round_ended = round_ended || ends_round(event);
    }
    return false;  // never used: not known
  }

  bool known(int optimizer) const {
    for (size_t i = history_.size(); i-- > 0;) {
      if (history_[i] == Event::kForget0 && optimizer == 0) return false;
      if (is_use(history_[i]) && optimizer_of(history_[i]) == optimizer) return true;
    }
    return false;
  }

 private:
  template <typename Kind>
  bool used_in_round(int optimizer, const Kind& kind) const {
    for (size_t i = history_.size(); i-- > 0;) {
      const Event event = history_[i];
      if (ends_round(event)) return false;
      if (event == Event::kForget0 && optimizer == 0) return false;
      if (kind(event) && (optimizer < 0 || optimizer_of(event) == optimizer)) return true;
    }
    return false;
  }
  bool loss_in_round() const {
    for (size_t i = history_.size(); i-- > 0;) {
      const Event event = history_[i];
      if (ends_round(event) || event == Event::kDiscard) return false;
      if (event == Event::kLoss || event == Event::kGrads) return true;
    }
    return false;
  }
  bool unused() const {
    for (size_t i = history_.size(); i-- > 0;) {
      const Event event = history_[i];
      if (is_use(event) || event == Event::kDiscard) return false;
      if (event == Event::kGrads) return true;
    }
    return false;
  }

  const std::vector<Event>& history_;
};

// The order, the history, and gradients with their true sums.
struct State {
  CallOrder order;
  std::vector<Event> history;
  double scale = 1024.0;
  double memory[2] = {0.0, 0.0};
  double sum[2] = {0.0, 0.0};
  bool unknown_since[2] = {false, false};  // has gradients of rounds before it was first used
};

// Makes the call, if it is allowed. Returns a sentence if the answer or a value is wrong.
std::string make(Event event, State* state) {
  const Model model(state->history);
  const int optimizer = optimizer_of(event);
  const auto id = static_cast<uint64_t>(optimizer);
  CallOrder& order = state->order;
  Refusal answer = Refusal::kNone;
  if (is_unscale(event)) answer = order.may_unscale(id);
  if (is_step(event)) answer = order.may_step(id, false);
  if (event == Event::kUpdate) answer = order.may_update();
  if (event == Event::kSetScale) answer = order.may_set_scale();
  if (event == Event::kSave) answer = order.may_save();
  if (answer != model.answer(event)) {
    return "answered " + std::to_string(static_cast<int>(answer)) + ", expected " +
           std::to_string(static_cast<int>(model.answer(event)));
  }
  if (answer != Refusal::kNone) return "";
  const bool unscaled = model.unscaled(optimizer);
  if (is_use(event) && order.is_unscaled(id) != unscaled) return "is_unscaled() is wrong";
  switch (event) {
    case Event::kLoss:
      order.loss_scaled();
      break;
    case Event::kGrads:
      order.gradients_added();
      for (int i = 0; i < 2; ++i) {
        if (model.unscaled(i)) continue;  // nothing may be added to it
        state->memory[i] += state->scale;
        state->sum[i] += 1.0;
      }
      break;
    case Event::kUnscale0:
    case Event::kUnscale1:
      order.unscaled(id, true);
      state->memory[optimizer] /= state->scale;
      break;
    case Event::kStep0:
    case Event::kStep1: {
      order.stepped(id);
      const double used = state->memory[optimizer] / (unscaled ? 1.0 : state->scale);
      if (used != state->sum[optimizer] && !state->unknown_since[optimizer]) {
        return "a step used " + std::to_string(used) + " for a true sum of " +
               std::to_string(state->sum[optimizer]);
      }
      state->memory[optimizer] = state->sum[optimizer] = 0.0;
      state->unknown_since[optimizer] = false;
      break;
    }
    case Event::kUpdate:
    case Event::kSetScale: {
      for (int i = 0; i < 2; ++i) {
        state->unknown_since[i] =
            state->unknown_since[i] || (!model.known(i) && state->sum[i] != 0.0);
      }
      const double next = event == Event::kUpdate ? 2.0 * state->scale : 8.0;
      for (const CallOrder::Rescale& rescale : order.rescales()) {
        state->memory[rescale.optimizer] *= rescale.unscaled ? next : next / state->scale;
      }
      order.end_round();
      state->scale = next;
      break;
    }
    case Event::kDiscard:
      order.discard();
      for (int i = 0; i < 2; ++i) {
        state->memory[i] = state->sum[i] = 0.0;
        state->unknown_since[i] = false;
      }
      break;
    case Event::kForget0:
      order.forget(0);
      state->memory[0] = state->sum[0] = 0.0;
      state->unknown_since[0] = false;
      break;
    default:
      break;
  }
  state->history.push_back(event);
  return "";
}

std::string text_of(const std::vector<Event>& history, Event last) {
  std::string text;
  for (const Event event : history) text += std::to_string(static_cast<int>(event)) + " ";
  return text + std::to_string(static_cast<int>(last));
}

int64_t try_all(const State& state, int depth) {
  int64_t sequences = 0;
  for (int e = 0; e < static_cast<int>(Event::kCount); ++e) {
    const auto event = static_cast<Event>(e);
    State next = state;
    const std::string wrong = make(event, &next);
    EXPECT_EQ(wrong, "") << text_of(state.history, event);
    ++sequences;
    if (depth > 1 && wrong.empty()) sequences += try_all(next, depth - 1);
  }
  return sequences;
}

TEST(CallOrder, AllSequencesOfSixCallsForTwoOptimizersFollowTheModel) {
  EXPECT_EQ(try_all(State{}, 6), 11 + 121 + 1331 + 14641 + 161051 + 1771561);
}

TEST(CallOrder, AMillionLongerRandomSequencesFollowTheModel) {
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    State state;
    const int length = 7 + static_cast<int>(random() % 14);
    for (int call = 0; call < length; ++call) {
      const auto event = static_cast<Event>(random() % static_cast<int>(Event::kCount));
      const std::string wrong = make(event, &state);
      ASSERT_EQ(wrong, "") << text_of(state.history, event);
    }
  }
}

TEST(CallOrder, UnderAPolicyThatRetriesOneOptimizerStepsInARound) {
  CallOrder order;
  order.gradients_added();
  EXPECT_EQ(order.may_step(0, true), Refusal::kNone);
  order.stepped(0);
  EXPECT_EQ(order.may_step(1, true), Refusal::kSecondOptimizer);
  EXPECT_EQ(order.may_step(1, false), Refusal::kNone);
  order.end_round();
  order.gradients_added();
  EXPECT_EQ(order.may_step(1, true), Refusal::kNone);
}

TEST(CallOrder, AnUnscaleWithoutGradientsIsNothingToUpdateBy) {
  CallOrder order;
  order.loss_scaled();
  order.unscaled(0, false);
  EXPECT_EQ(order.may_update(), Refusal::kNothingStepped);
}

TEST(CallOrder, EveryRefusalHasASentenceThatNamesTheCall) {
  for (int i = 1; i <= static_cast<int>(Refusal::kStepNotCounted); ++i) {
    const std::string sentence = refusal_sentence(static_cast<Refusal>(i), "step()");
    EXPECT_EQ(sentence.find("step() was called "), 0u) << sentence;
    EXPECT_EQ(sentence.back(), '.');
  }
}

}  // namespace
}  // namespace headroom::internal
