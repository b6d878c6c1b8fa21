// The rules of call order against a stateless model that reads the whole history of calls each
// time: all sequences of up to six calls, and a million longer random ones. The gradients are
// simulated too: an allowed step must use the true sum of its gradients.
#include "decide/call_order.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace headroom::internal {
namespace {

using Refusal = CallOrder::Refusal;

enum class Event : uint8_t {
  kLoss,   // a loss is scaled, but its backward does not run
  kGrads,  // a loss is scaled and its backward adds to all gradients
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

// Derives every answer from the history of allowed calls.
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
      return loss_in_round() || has_pending(optimizer) ? Refusal::kNone : Refusal::kNothingScaled;
    }
    if (event == Event::kUpdate) {
      return used_in_round(-1, is_use) ? Refusal::kNone : Refusal::kNothingStepped;
    }
    if (event == Event::kSave) {
      return used_in_round(-1, is_use) ? Refusal::kStepNotCounted : Refusal::kNone;
    }
    if (event == Event::kSetScale)
      return has_unused_gradients() ? Refusal::kGradientsWaiting : Refusal::kNone;
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

  // Gradients were added since the optimizer's last use, or were unscaled when a round ended.
  bool has_pending(int optimizer) const {
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
    return false;  // CallOrder does not know an optimizer before its first use
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
  bool has_unused_gradients() const {
    for (size_t i = history_.size(); i-- > 0;) {
      const Event event = history_[i];
      if (is_use(event) || event == Event::kDiscard) return false;
      if (event == Event::kGrads) return true;
    }
    return false;
  }

  const std::vector<Event>& history_;
};

// CallOrder under test, the calls it allowed, and one gradient per optimizer.
struct Simulation {
  CallOrder order;
  std::vector<Event> history;
  double scale = 1024.0;
  double grad[2] = {0.0, 0.0};      // as stored: scaled, or unscaled after unscale_()
  double true_sum[2] = {0.0, 0.0};  // unscaled
  // Holds gradients from rounds before the optimizer's first use, which CallOrder cannot rescale.
  bool untracked[2] = {false, false};

  void clear(int optimizer) {
    grad[optimizer] = true_sum[optimizer] = 0.0;
    untracked[optimizer] = false;
  }
};

Refusal ask(const CallOrder& order, Event event) {
  const auto id = static_cast<uint64_t>(optimizer_of(event));
  if (is_unscale(event)) return order.may_unscale(id);
  if (is_step(event)) return order.may_step(id, false);
  if (event == Event::kUpdate) return order.may_update();
  if (event == Event::kSetScale) return order.may_set_scale();
  return event == Event::kSave ? order.may_save() : Refusal::kNone;
}

void add_gradients(const Model& model, Simulation* simulation) {
  simulation->order.gradients_added();
  for (int i = 0; i < 2; ++i) {
    if (model.unscaled(i)) continue;  // a scaled gradient must not be added to an unscaled one
    simulation->grad[i] += simulation->scale;
    simulation->true_sum[i] += 1.0;
  }
}

// Returns a message if the step does not use the true sum.
std::string step(const Model& model, int optimizer, Simulation* simulation) {
  simulation->order.stepped(static_cast<uint64_t>(optimizer));
  const double divisor = model.unscaled(optimizer) ? 1.0 : simulation->scale;
  const double used = simulation->grad[optimizer] / divisor;
  const double expected = simulation->true_sum[optimizer];
  const bool wrong = used != expected && !simulation->untracked[optimizer];
  simulation->clear(optimizer);
  if (!wrong) return "";
  return "a step used " + std::to_string(used) + " for a true sum of " + std::to_string(expected);
}

void end_round(const Model& model, double next_scale, Simulation* simulation) {
  for (int i = 0; i < 2; ++i) {
    if (!model.known(i) && simulation->true_sum[i] != 0.0) simulation->untracked[i] = true;
  }
  for (const CallOrder::Rescale& rescale : simulation->order.rescales()) {
    simulation->grad[rescale.optimizer] *=
        rescale.unscaled ? next_scale : next_scale / simulation->scale;
  }
  simulation->order.end_round();
  simulation->scale = next_scale;
}

// Performs an allowed call. Returns a message if a value is wrong.
std::string perform(Event event, const Model& model, Simulation* simulation) {
  const int optimizer = optimizer_of(event);
  switch (event) {
    case Event::kLoss:
      simulation->order.loss_scaled();
      break;
    case Event::kGrads:
      add_gradients(model, simulation);
      break;
    case Event::kUnscale0:
    case Event::kUnscale1:
      simulation->order.unscaled(static_cast<uint64_t>(optimizer), true);
      simulation->grad[optimizer] /= simulation->scale;
      break;
    case Event::kStep0:
    case Event::kStep1:
      return step(model, optimizer, simulation);
    case Event::kUpdate:
      end_round(model, 2.0 * simulation->scale, simulation);
      break;
    case Event::kSetScale:
      end_round(model, 8.0, simulation);
      break;
    case Event::kDiscard:
      simulation->order.discard();
      for (int i = 0; i < 2; ++i) simulation->clear(i);
      break;
    case Event::kForget0:
      simulation->order.forget(0);
      simulation->clear(0);
      break;
    default:
      break;
  }
  return "";
}

// Makes a call if it is allowed. Returns a message if the answer or a value is wrong.
std::string make_call(Event event, Simulation* simulation) {
  const Model model(simulation->history);
  const Refusal answer = ask(simulation->order, event);
  const Refusal expected = model.answer(event);
  if (answer != expected) {
    return "answered " + std::to_string(static_cast<int>(answer)) + ", expected " +
           std::to_string(static_cast<int>(expected));
  }
  if (answer != Refusal::kNone) return "";
  const int optimizer = optimizer_of(event);
  const auto id = static_cast<uint64_t>(optimizer);
  if (is_use(event) && simulation->order.is_unscaled(id) != model.unscaled(optimizer)) {
    return "is_unscaled() is wrong";
  }
  const std::string wrong = perform(event, model, simulation);
  if (wrong.empty()) simulation->history.push_back(event);
  return wrong;
}

std::string describe(const std::vector<Event>& history, Event last) {
  std::string text;
  for (const Event event : history) text += std::to_string(static_cast<int>(event)) + " ";
  return text + std::to_string(static_cast<int>(last));
}

// Returns the number of sequences tried.
int64_t try_all_sequences(const Simulation& simulation, int depth) {
  int64_t sequences = 0;
  for (int e = 0; e < static_cast<int>(Event::kCount); ++e) {
    const auto event = static_cast<Event>(e);
    Simulation next = simulation;
    const std::string wrong = make_call(event, &next);
    EXPECT_EQ(wrong, "") << describe(simulation.history, event);
    ++sequences;
    if (depth > 1 && wrong.empty()) sequences += try_all_sequences(next, depth - 1);
  }
  return sequences;
}

TEST(CallOrder, AllSequencesOfSixCallsMatchTheModel) {
  EXPECT_EQ(try_all_sequences(Simulation{}, 6), 11 + 121 + 1331 + 14641 + 161051 + 1771561);
}

TEST(CallOrder, RandomLongerSequencesMatchTheModel) {
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    Simulation simulation;
    const int length = 7 + static_cast<int>(random() % 14);
    for (int call = 0; call < length; ++call) {
      const auto event = static_cast<Event>(random() % static_cast<int>(Event::kCount));
      const std::string wrong = make_call(event, &simulation);
      ASSERT_EQ(wrong, "") << describe(simulation.history, event);
    }
  }
}

TEST(CallOrder, RetryPoliciesAllowOneOptimizerPerRound) {
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

TEST(CallOrder, ALossIsAssumedOnceInARound) {
  CallOrder order;
  order.assume_losses();
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(order.may_step(0, false), Refusal::kNone);
    EXPECT_EQ(order.may_set_scale(), Refusal::kNone) << "no gradients wait before the first use";
    order.unscaled(0, true);
    order.stepped(0);
    EXPECT_EQ(order.may_step(1, false), Refusal::kNone);
    order.stepped(1);
    EXPECT_TRUE(order.rescales().empty()) << "both have used their gradients";
    order.end_round();
  }
  order.stepped(0);
  ASSERT_EQ(order.rescales().size(), 1u) << "the loss may have added to the other's gradients";
  EXPECT_EQ(order.rescales()[0].optimizer, 1u);
}

TEST(CallOrder, UpdateAfterUnscalingNoGradientsIsRejected) {
  CallOrder order;
  order.loss_scaled();
  order.unscaled(0, false);
  EXPECT_EQ(order.may_update(), Refusal::kNothingStepped);
}

TEST(CallOrder, EveryRefusalMessageNamesTheCall) {
  for (int i = 1; i <= static_cast<int>(Refusal::kStepNotCounted); ++i) {
    const std::string message = refusal_sentence(static_cast<Refusal>(i), "step()");
    EXPECT_EQ(message.find("step() was called "), 0u) << message;
    EXPECT_EQ(message.back(), '.');
  }
}

}  // namespace
}  // namespace headroom::internal
