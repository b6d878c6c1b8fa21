// Visits every member of a policy and of a state by name, so that writing, reading and comparing
// them cannot list different ones.
#ifndef HEADROOM_SRC_SCALER_MEMBERS_H_
#define HEADROOM_SRC_SCALER_MEMBERS_H_

#include <headroom/policy.h>

#include "agree/message.h"

namespace headroom::internal {

template <typename Policy, typename Visit>
HEADROOM_HOST_DEVICE void visit_policy(Policy& policy, int version, const Visit& visit) {
  visit("dynamic", policy.dynamic);
  visit("init_scale", policy.init_scale);
  visit("growth_factor", policy.growth_factor);
  visit("backoff_factor", policy.backoff_factor);
  visit("growth_interval", policy.growth_interval);
  visit("min_scale", policy.min_scale);
  visit("max_scale", policy.max_scale);
  visit("first_growth_extra", policy.first_growth_extra);
  visit("next_growth_extra", policy.next_growth_extra);
  visit("hysteresis", policy.hysteresis);
  visit("refill_on_growth", policy.refill_on_growth);
  visit("refill_on_clean", policy.refill_on_clean);
  visit("refill_on_shrink", policy.refill_on_shrink);
  visit("tolerance", policy.tolerance);
  visit("late", policy.late);
  visit("stay_above_min", policy.stay_above_min);
  visit("on_overflow", policy.on_overflow);
  visit("max_skips_in_row", policy.max_skips_in_row);
  if (version < 2) return;
  visit("grad_limit", policy.grad_limit);
  visit("peak_window", policy.peak_window);
  visit("retry_interval", policy.retry_interval);
  if (version < 3) return;
  visit("rerun", policy.rerun);
}

template <typename State, typename Visit>
HEADROOM_HOST_DEVICE void visit_state(State& state, int version, const Visit& visit) {
  visit("scale", state.scale);
  visit("pending", state.pending);
  visit("growth_tracker", state.growth_tracker);
  visit("delay_left", state.delay_left);
  visit("since_rescale", state.since_rescale);
  visit("overflows_since_rescale", state.overflows_since_rescale);
  visit("skips_in_row", state.skips_in_row);
  visit("steps", state.steps);
  visit("skipped", state.skipped);
  if (version < 2) return;
  visit("samples", state.samples);
  visit("peak", state.peak);
  visit("peak_before", state.peak_before);
  visit("window", state.window);
  visit("scatter", state.scatter);
  visit("lowest", state.lowest);
  visit("ages", state.ages);
  visit("back", state.back);
  visit("gap", state.gap);
  visit("retry_wait", state.retry_wait);
  visit("retry_left", state.retry_left);
  visit("trial_left", state.trial_left);
  visit("calm", state.calm);
  visit("failed_scale", state.failed_scale);
}

/// The newest version of saved scalers, with all members.
inline constexpr int kStateVersion = 3;

/// A visitor that makes one number of all it sees.
struct Fingerprint {
  double* sum;
  template <typename T>
  HEADROOM_HOST_DEVICE void operator()(const char*, const T& value) const {
    *sum = fingerprint(*sum, static_cast<double>(value));
  }
  HEADROOM_HOST_DEVICE void operator()(const char*, const int32_t (&values)[kLevels]) const {
    for (const int32_t value : values) (*this)("", value);
  }
};

HEADROOM_HOST_DEVICE inline double policy_fingerprint(const ScalePolicy& policy) {
  double sum = 0.0;
  visit_policy(policy, kStateVersion, Fingerprint{&sum});
  return sum;
}
HEADROOM_HOST_DEVICE inline double state_fingerprint(const ScaleState& state) {
  double sum = 0.0;
  visit_state(state, kStateVersion, Fingerprint{&sum});
  return sum;
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_SCALER_MEMBERS_H_
