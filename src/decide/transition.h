// decide/ contains the policies, the state machine of the scale, the verdict on a step and the
// rules of call order. It must not know about tensors, devices or ranks.
//
// This header is the state machine: one update moves the scale from one step to the next. It is
// plain arithmetic on trivially copyable structs, so that the same source runs on the host and in
// CUDA kernels. It is not a public header, so that users' compiler flags cannot change results.
#ifndef HEADROOM_SRC_DECIDE_TRANSITION_H_
#define HEADROOM_SRC_DECIDE_TRANSITION_H_

#include <headroom/policy.h>

#include <cstdint>

#include "decide/headroom_rule.h"

namespace headroom::internal {

/// The state of DynamicScale's rule.
struct DynamicMemory {
  float pending = 0.0f;        // the scale after the next one; differs from it only if `late`
  int32_t growth_tracker = 0;  // clean steps in a row, from -extra; growth at growth_interval
  int32_t delay_left = 1;      // overflows until the scale shrinks
  int64_t since_rescale = 0;   // steps since the scale last changed,
  int64_t overflows_since_rescale = 0;  // of which overflows
};

/// Everything about the scale that changes during training.
struct ScaleNumbers {
  float scale = 0.0f;   // multiplies the next loss
  int64_t steps = 0;    // updates so far,
  int64_t skipped = 0;  // of which overflows
  int64_t skips_in_row = 0;
  DynamicMemory dynamic;    // of DynamicScale
  HeadroomMemory headroom;  // of HeadroomScale
};

/// A policy and its state: the contents of ScaleState, and of a scaler on a CUDA device.
struct ScaleRecord {
  ScalePolicy policy;
  ScaleNumbers numbers;
};

/// Access to the contents of a ScaleState, which is opaque to users.
struct ScaleStateAccess {
  static const ScaleRecord& record(const ScaleState& state) { return *state.record_; }
  static ScaleState make(const ScaleRecord& record) { return ScaleState(record); }
};

/// Calls visit(name, member) for every number that the rule uses. Writing, reading and fingerprints
/// of a state use this one list.
template <typename Numbers, typename Visit>
HEADROOM_HOST_DEVICE void visit_numbers(ScalePolicy::Rule rule, Numbers& numbers,
                                        const Visit& visit) {
  visit("scale", numbers.scale);
  visit("steps", numbers.steps);
  visit("skipped", numbers.skipped);
  visit("skips_in_row", numbers.skips_in_row);
  if (rule == ScalePolicy::Rule::kDynamic) {
    visit("pending", numbers.dynamic.pending);
    visit("growth_tracker", numbers.dynamic.growth_tracker);
    visit("delay_left", numbers.dynamic.delay_left);
    visit("since_rescale", numbers.dynamic.since_rescale);
    visit("overflows_since_rescale", numbers.dynamic.overflows_since_rescale);
  }
  if (rule == ScalePolicy::Rule::kHeadroom) {
    visit("climb_limit", numbers.headroom.climb_limit);
    visit("backoff_from", numbers.headroom.backoff_from);
    visit("clean_steps", numbers.headroom.clean_steps);
    visit("steps_since_growth", numbers.headroom.steps_since_growth);
    visit("pause", numbers.headroom.pause);
  }
}

/// Throws Error(kBadState) unless a scaler with this policy can reach these numbers.
HEADROOM_API void check_numbers(const ScalePolicy& policy, const ScaleNumbers& numbers);

/// The numbers before the first step.
inline ScaleNumbers initial_numbers(const ScalePolicy& policy) {
  ScaleNumbers numbers;
  numbers.scale = numbers.dynamic.pending = policy.init_scale();
  if (const DynamicScale* const rule = policy.if_dynamic()) {
    numbers.dynamic.growth_tracker = -rule->first_growth_extra;
    numbers.dynamic.delay_left = rule->hysteresis;
  }
  return numbers;
}

/// The larger scale. The product is computed in double and rounded once.
HEADROOM_HOST_DEVICE inline float grown(const DynamicScale& rule, float scale) {
  const double product = static_cast<double>(scale) * rule.growth_factor;
  return product < static_cast<double>(rule.max_scale) ? static_cast<float>(product)
                                                       : rule.max_scale;
}

/// The smaller scale, or `scale` itself if the policy allows none.
HEADROOM_HOST_DEVICE inline float shrunk(const DynamicScale& rule, float scale) {
  const auto product = static_cast<float>(static_cast<double>(scale) * rule.backoff_factor);
  if (product > rule.min_scale) return product;
  return rule.stay_above_min || scale < rule.min_scale ? scale : rule.min_scale;
}

/// DynamicScale after an overflow: shrinks unless tolerance or hysteresis says to wait.
HEADROOM_HOST_DEVICE inline float after_overflow(const DynamicScale& rule, float scale,
                                                 DynamicMemory* memory, Alarm* alarm) {
  ++memory->overflows_since_rescale;
  memory->growth_tracker = -rule.first_growth_extra;
  const double share = static_cast<double>(memory->overflows_since_rescale) /
                       static_cast<double>(memory->since_rescale);
  if (share < rule.tolerance) return scale;
  if (memory->delay_left > 1) {
    --memory->delay_left;
    return scale;
  }
  if (rule.refill_on_shrink) memory->delay_left = rule.hysteresis;
  memory->since_rescale = 0;
  memory->overflows_since_rescale = 0;
  const float smaller = shrunk(rule, scale);
  if (smaller == scale) *alarm = Alarm::kAtFloor;
  return smaller;
}

/// DynamicScale after a clean step: grows after growth_interval of them.
HEADROOM_HOST_DEVICE inline float after_clean_step(const DynamicScale& rule, float scale,
                                                   DynamicMemory* memory) {
  if (rule.refill_on_clean) memory->delay_left = rule.hysteresis;
  if (++memory->growth_tracker < rule.growth_interval) return scale;
  memory->growth_tracker = -rule.next_growth_extra;
  if (rule.refill_on_growth) memory->delay_left = rule.hysteresis;
  memory->since_rescale = 0;  // fairseq does not reset overflows_since_rescale here
  return grown(rule, scale);
}

/// icefall's doubling on a schedule, after an update. `batch` counts from 0. The growth count and
/// the other counts of the rule do not change.
HEADROOM_HOST_DEVICE inline float doubled_when_small(const DynamicScale& rule, float scale,
                                                     int64_t batch) {
  const bool due = (batch % 25 == 0 && scale < 2.0f) || (batch % 100 == 0 && scale < 8.0f) ||
                   (batch % 400 == 0 && scale < 32.0f);
  if (!due) return scale;
  return 2.0f * scale < rule.max_scale ? 2.0f * scale : rule.max_scale;
}

/// With `late`, the scale that was computed in the last update takes effect now.
HEADROOM_HOST_DEVICE inline Alarm advance_dynamic(const DynamicScale& rule, bool overflow,
                                                  ScaleNumbers* numbers) {
  DynamicMemory& memory = numbers->dynamic;
  Alarm alarm = Alarm::kNone;
  ++memory.since_rescale;
  const float current = memory.pending;
  memory.pending = overflow ? after_overflow(rule, current, &memory, &alarm)
                            : after_clean_step(rule, current, &memory);
  if (rule.double_when_small) {
    memory.pending = doubled_when_small(rule, memory.pending, numbers->steps - 1);
  }
  numbers->scale = rule.late ? current : memory.pending;
  return alarm;
}

HEADROOM_HOST_DEVICE inline Alarm advance_headroom(const HeadroomScale& rule, const StepSeen& seen,
                                                   ScaleNumbers* numbers) {
  const HeadroomResult next =
      headroom_rule(rule, numbers->scale, seen.overflow, seen.amax, &numbers->headroom);
  numbers->scale = numbers->dynamic.pending = next.scale;
  return next.at_floor ? Alarm::kAtFloor : Alarm::kNone;
}

/// Adds the result of one optimizer's step or unscale_() to the input of the next update.
HEADROOM_HOST_DEVICE inline void see(bool overflow, double amax, StepSeen* seen) {
  seen->overflow = seen->overflow || overflow;
  if (amax > seen->amax) seen->amax = amax;
}

/// How many skips in a row raise the alarm; 0: any number is allowed.
HEADROOM_HOST_DEVICE inline int64_t max_skips_in_row(const ScalePolicy& policy) {
  constexpr int64_t kFourBatches = 32;  // passes: with retry a batch is given up after 8 of them
  if (const StaticScale* const rule = policy.if_static()) return rule->max_skips_in_row;
  if (const DynamicScale* const rule = policy.if_dynamic()) return rule->max_skips_in_row;
  const HeadroomScale& rule = *policy.if_headroom();
  return rule.retry && rule.max_skips_in_row == 0 ? kFourBatches : rule.max_skips_in_row;
}

/// One update: the whole state machine. An alarm does not stop it; the caller reports it. The floor
/// takes precedence over the number of skips.
HEADROOM_HOST_DEVICE inline Alarm advance(const ScalePolicy& policy, const StepSeen& seen,
                                          ScaleNumbers* numbers) {
  ++numbers->steps;
  numbers->skipped += seen.overflow ? 1 : 0;
  numbers->skips_in_row = seen.overflow ? numbers->skips_in_row + 1 : 0;
  Alarm alarm = Alarm::kNone;
  if (const DynamicScale* const rule = policy.if_dynamic()) {
    alarm = advance_dynamic(*rule, seen.overflow, numbers);
  } else if (const HeadroomScale* const headroom = policy.if_headroom()) {
    alarm = advance_headroom(*headroom, seen, numbers);
  }
  const int64_t most = max_skips_in_row(policy);
  const bool too_many = seen.overflow && most > 0 && numbers->skips_in_row >= most;
  return alarm == Alarm::kNone && too_many ? Alarm::kSkipsInRow : alarm;
}

/// Whether the batch of the last step has to be retried at the current scale.
HEADROOM_HOST_DEVICE inline bool retry(const ScalePolicy& policy, const ScaleNumbers& numbers) {
  return policy.retries() && headroom_retry(*policy.if_headroom(), numbers.headroom);
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DECIDE_TRANSITION_H_
