// Properties of DynamicScale under random settings and random overflows.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/decide/support.h"

namespace headroom {
namespace {

float random_scale() {
  const float mantissa = 1.0f + static_cast<float>(*rc::gen::inRange(0, 8)) / 8.0f;
  return std::ldexp(mantissa, *rc::gen::inRange(-125, 125));
}

DynamicScale random_policy() {
  DynamicScale policy;
  std::vector<float> scales = {random_scale(), random_scale(), random_scale()};
  std::sort(scales.begin(), scales.end());
  policy.min_scale = scales[0];
  policy.init_scale = scales[1];
  policy.max_scale = scales[2];
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
  policy.double_when_small = *rc::gen::arbitrary<bool>();
  policy.max_skips_in_row = *rc::gen::inRange(0, 5);
  validate(policy);
  return policy;
}

std::vector<bool> random_overflows() {
  return *rc::gen::container<std::vector<bool>>(
      *rc::gen::inRange<size_t>(0, 400),
      rc::gen::weightedElement<bool>({{3, false}, {*rc::gen::inRange<size_t>(1, 9), true}}));
}

RC_GTEST_PROP(PolicyProperty, ScaleStaysNormalAndInBounds, ()) {
  const DynamicScale policy = random_policy();
  ScaleNumbers state = initial_numbers(policy);
  for (const bool overflow : random_overflows()) {
    advance(policy, overflow, &state);
    RC_ASSERT(state.scale >= policy.min_scale && state.scale <= policy.max_scale);
    RC_ASSERT(state.dynamic.pending >= policy.min_scale &&
              state.dynamic.pending <= policy.max_scale);
    RC_ASSERT(std::isnormal(state.scale) && std::isnormal(inverse(state.scale)));
  }
}

RC_GTEST_PROP(PolicyProperty, OverflowNeverRaisesAndCleanStepNeverLowersTheScale, ()) {
  DynamicScale policy = random_policy();
  policy.late = policy.double_when_small = false;
  ScaleNumbers state = initial_numbers(policy);
  for (const bool overflow : random_overflows()) {
    const float before = state.scale;
    advance(policy, overflow, &state);
    RC_ASSERT((overflow ? state.scale <= before : state.scale >= before));
  }
}

RC_GTEST_PROP(PolicyProperty, CountersMatchTheSteps, ()) {
  const DynamicScale policy = random_policy();
  ScaleNumbers state = initial_numbers(policy);
  int64_t skipped = 0, in_row = 0;
  const std::vector<bool> overflows = random_overflows();
  for (const bool overflow : overflows) {
    const Alarm alarm = advance(policy, overflow, &state);
    skipped += overflow;
    in_row = overflow ? in_row + 1 : 0;
    RC_ASSERT(state.skips_in_row == in_row);
    RC_ASSERT((overflow || alarm == Alarm::kNone));
    if (overflow && policy.max_skips_in_row > 0 && in_row >= policy.max_skips_in_row) {
      RC_ASSERT(alarm != Alarm::kNone);
    }
  }
  RC_ASSERT(state.skipped == skipped);
  RC_ASSERT(state.steps == static_cast<int64_t>(overflows.size()));
}

RC_GTEST_PROP(PolicyProperty, SaveAndLoadPreserveTheTrajectory, ()) {
  const DynamicScale policy = random_policy();
  const std::vector<bool> overflows = random_overflows();
  const size_t saved_at = *rc::gen::inRange<size_t>(0, overflows.size() + 1);
  ScaleState state{ScalePolicy(policy)};
  for (size_t i = 0; i < saved_at; ++i) state.advance({overflows[i], 0.0});
  ScaleState resumed = ScaleState::load(state.save());
  RC_ASSERT(state == resumed);
  for (size_t i = saved_at; i < overflows.size(); ++i) {
    state.advance({overflows[i], 0.0});
    resumed.advance({overflows[i], 0.0});
    RC_ASSERT(state == resumed);
  }
}

}  // namespace
}  // namespace headroom
