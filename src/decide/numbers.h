// Visits the numbers of a state by name, so that writing, reading and comparing them cannot list
// different ones.
#ifndef HEADROOM_SRC_DECIDE_NUMBERS_H_
#define HEADROOM_SRC_DECIDE_NUMBERS_H_

#include "decide/transition.h"

namespace headroom::internal {

/// Calls visit(name, member) for the numbers that a rule uses.
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
    visit("climb_to", numbers.headroom.climb_to);
    visit("failed", numbers.headroom.failed);
    visit("calm", numbers.headroom.calm);
    visit("age", numbers.headroom.age);
    visit("pause", numbers.headroom.pause);
  }
}

/// Throws Error(kBadState) with a sentence unless a scaler with this policy can have these numbers.
HEADROOM_API void check_numbers(const ScalePolicy& policy, const ScaleNumbers& numbers);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DECIDE_NUMBERS_H_
