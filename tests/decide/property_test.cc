// Over random settings and random overflows.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/support.h"

namespace headroom {
namespace {

float random_scale() {
  const float mantissa = 1.0f + static_cast<float>(*rc::gen::inRange(0, 8)) / 8.0f;
  return std::ldexp(mantissa, *rc::gen::inRange(-125, 125));
}

ScalePolicy random_policy() {
  ScalePolicy policy;
  std::vector<float> scales = {random_scale(), random_scale(), random_scale()};
  std::sort(scales.begin(), scales.end());
  policy.min_scale = scales[0];
  policy.init_scale = scales[1];
  policy.max_scale = scales[2];
  policy.dynamic = *rc::gen::weightedElement<bool>({{9, true}, {1, false}});
  policy.growth_factor = 1.0 + *rc::gen::inRange(1, 4000) / 100.0;
  policy.backoff_factor = *rc::gen::inRange(1, 100) / 100.0;
  policy.growth_interval = *rc::gen::inRange(1, 6);
  policy.hysteresis = *rc::gen::inRange(1, 4);
  policy.first_growth_extra = *rc::gen::inRange(0, 2);
  policy.next_growth_extra = *rc::gen::inRange(0, 2);
  policy.refill_on_growth = *rc::gen::arbitrary<bool>();
  policy.refill_on_clean = *rc::gen::arbitrary<bool>();
  policy.refill_on_shrink = *rc::gen::arbitrary<bool>();
  policy.tolerance = *rc::gen::element(0.0, 0.1, 0.5, 1.0);
  policy.late = *rc::gen::arbitrary<bool>();
  policy.stay_above_min = policy.init_scale > policy.min_scale && *rc::gen::arbitrary<bool>();
  policy.max_skips_in_row = *rc::gen::inRange(0, 5);
  validate(policy);
  return policy;
}

std::vector<bool> random_overflows() {
  return *rc::gen::container<std::vector<bool>>(
      *rc::gen::inRange<size_t>(0, 400),
      rc::gen::weightedElement<bool>({{3, false}, {*rc::gen::inRange<size_t>(1, 9), true}}));
}

RC_GTEST_PROP(PolicyProperty, TheScaleStaysFinitePositiveAndInBounds, ()) {
  const ScalePolicy policy = random_policy();
  ScaleState state = initial_state(policy);
  for (const bool overflow : random_overflows()) {
    state = next_state(policy, state, overflow).state;
    RC_ASSERT(state.scale >= policy.min_scale && state.scale <= policy.max_scale);
    RC_ASSERT(state.pending >= policy.min_scale && state.pending <= policy.max_scale);
    RC_ASSERT(std::isnormal(state.scale) && std::isnormal(inverse(state.scale)));
  }
}

RC_GTEST_PROP(PolicyProperty, AnOverflowNeverGrowsTheScaleAndACleanStepNeverShrinksIt, ()) {
  ScalePolicy policy = random_policy();
  policy.late = false;
  ScaleState state = initial_state(policy);
  for (const bool overflow : random_overflows()) {
    const ScaleState next = next_state(policy, state, overflow).state;
    RC_ASSERT((overflow ? next.scale <= state.scale : next.scale >= state.scale));
    state = next;
  }
}

RC_GTEST_PROP(PolicyProperty, CountsAddUp, ()) {
  const ScalePolicy policy = random_policy();
  ScaleState state = initial_state(policy);
  int64_t skipped = 0, in_row = 0;
  const std::vector<bool> overflows = random_overflows();
  for (const bool overflow : overflows) {
    const Transition next = next_state(policy, state, overflow);
    state = next.state;
    skipped += overflow;
    in_row = overflow ? in_row + 1 : 0;
    RC_ASSERT(state.skips_in_row == in_row);
    RC_ASSERT((overflow || next.alarm == Alarm::kNone));
    if (overflow && policy.max_skips_in_row > 0 && in_row >= policy.max_skips_in_row) {
      RC_ASSERT(next.alarm != Alarm::kNone);
    }
  }
  RC_ASSERT(state.skipped == skipped);
  RC_ASSERT(state.steps == static_cast<int64_t>(overflows.size()));
}

RC_GTEST_PROP(PolicyProperty, SavingAndLoadingAtAnyStepContinuesTheSame, ()) {
  const ScalePolicy policy = random_policy();
  const std::vector<bool> overflows = random_overflows();
  const size_t cut = *rc::gen::inRange<size_t>(0, overflows.size() + 1);
  ScaleState state = initial_state(policy);
  for (size_t i = 0; i < cut; ++i) state = next_state(policy, state, overflows[i]).state;

  GradScaler saved(policy);
  saved.load_state(state);
  GradScaler loaded;  // another policy: load() brings the saved one
  loaded.load(saved.save());
  ScaleState resumed = loaded.state();
  for (size_t i = cut; i < overflows.size(); ++i) {
    state = next_state(policy, state, overflows[i]).state;
    resumed = next_state(loaded.policy(), resumed, overflows[i]).state;
  }
  RC_ASSERT(std::bit_cast<uint32_t>(state.scale) == std::bit_cast<uint32_t>(resumed.scale));
  RC_ASSERT(std::bit_cast<uint32_t>(state.pending) == std::bit_cast<uint32_t>(resumed.pending));
  RC_ASSERT(state.growth_tracker == resumed.growth_tracker);
  RC_ASSERT(state.delay_left == resumed.delay_left);
  RC_ASSERT(state.since_rescale == resumed.since_rescale);
  RC_ASSERT(state.overflows_since_rescale == resumed.overflows_since_rescale);
  RC_ASSERT(state.skips_in_row == resumed.skips_in_row);
  RC_ASSERT(state.steps == resumed.steps && state.skipped == resumed.skipped);
}

}  // namespace
}  // namespace headroom
