// Headroom's own rule, step by step and over random histories.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <random>

#include "tests/support.h"

namespace headroom {
namespace {

constexpr double kLimit = 65504.0;

// What a scaler sees of gradients of this size if backward overflows at `overflow_at` and above.
StepSeen seen_at(float scale, double amax, double overflow_at = HUGE_VAL) {
  const bool overflow = amax * scale > kLimit || scale >= overflow_at;
  return {overflow, overflow ? 0.0 : amax * scale};
}

struct Training {
  ScalePolicy policy = HeadroomScale{};
  ScaleState state = initial_state(policy);

  void steps(int count, double amax, double overflow_at = HUGE_VAL) {
    for (int i = 0; i < count; ++i) {
      state = next_state(policy, state, seen_at(state.scale, amax, overflow_at)).state;
    }
  }
};

float largest_safe(double amax) {
  return std::exp2(static_cast<float>(std::floor(std::log2(kLimit / amax))));
}

TEST(HeadroomRule, SitsAtTheLargestPowerOfTwoThatFits) {
  for (const double amax : {3.0, 0.9, 0.01, 1e-4}) {
    Training run;
    run.steps(5000, amax);
    EXPECT_EQ(run.state.scale, largest_safe(amax)) << amax;
    EXPECT_EQ(run.state.skipped, amax > 1.0 ? 1 : 0) << amax;  // it starts at 2^16
  }
}

TEST(HeadroomRule, AStartFarTooHighCostsTwoSkipsAndFewSteps) {
  Training run;
  run.policy.init_scale = 0x1p32f;
  run.state = initial_state(run.policy);
  run.steps(200, 2.0);
  EXPECT_EQ(run.state.skipped, 2);
  EXPECT_EQ(run.state.scale, largest_safe(2.0));
}

TEST(HeadroomRule, ItStartsWhereOthersDoAndIsRightAfterTwoSteps) {
  for (const double amax : {0.9, 1.5, 100.0}) {
    Training run;
    EXPECT_EQ(run.state.scale, 0x1p16f);
    run.steps(2, amax);
    EXPECT_EQ(run.state.scale, largest_safe(amax)) << amax;
    run.steps(300, amax);
    EXPECT_EQ(run.state.scale, largest_safe(amax)) << amax;
    EXPECT_EQ(run.state.skipped, amax > 1.0 ? 1 : 0) << amax;
  }
}

TEST(HeadroomRule, AStartTooHighForBackwardCostsTwoSkipsNotOneABit) {
  for (const float limit : {0x1p15f, 0x1p13f, 0x1p8f}) {
    Training run;
    run.steps(100, 0.1, limit);
    EXPECT_EQ(run.state.skipped, 2) << limit;
    EXPECT_EQ(run.state.scale, limit / 2.0f) << limit;
  }
}

TEST(HeadroomRule, RisingGradientsShrinkTheScaleBeforeTheyOverflow) {
  Training run;
  for (int i = 0; i < 10000; ++i) run.steps(1, std::exp2(-8.0 + i / 1000.0));
  EXPECT_EQ(run.state.skipped, 0);
  EXPECT_EQ(run.state.scale, largest_safe(4.0));
}

TEST(HeadroomRule, FallingGradientsAreFollowed) {
  Training run;
  for (int i = 0; i < 10000; ++i) run.steps(1, std::exp2(2.0 - i / 1000.0));
  EXPECT_EQ(run.state.skipped, 1);  // the first
  EXPECT_GE(run.state.scale, largest_safe(0x1p-8) / 4.0f);
}

TEST(HeadroomRule, AnOverflowInsideBackwardIsFoundOnceAndNotTriedAgainSoon) {
  Training run;
  run.steps(15000, 0.1, 0x1p13);
  EXPECT_EQ(run.state.skipped, 2);  // one of them at the start
  EXPECT_EQ(run.state.scale, 0x1p12f);
  run.steps(85000, 0.1, 0x1p13);  // each time it waits twice as long
  EXPECT_EQ(run.state.skipped, 4);
  EXPECT_EQ(run.state.scale, 0x1p12f);
}

TEST(HeadroomRule, WhatWasLearntInsideBackwardMovesWithTheGradients) {
  Training run;
  run.steps(1000, 0.1, 0x1p13);
  ASSERT_EQ(run.state.scale, 0x1p12f);
  for (int i = 0; i < 10000; ++i) {
    run.steps(1, 0.1 * std::exp2(-i / 1000.0), 0x1p13 * std::exp2(i / 1000.0));
  }
  EXPECT_EQ(run.state.skipped, 2);
  EXPECT_GE(run.state.scale, 0x1p20f);
}

TEST(HeadroomRule, GradientsThatRiseTowardsALimitInsideBackwardDoNotOverflowAtEveryBit) {
  Training run;
  std::mt19937 random(1);
  std::normal_distribution<double> noise(0.0, 0.1);
  for (int i = 0; i < 20000; ++i) {
    const double amax = std::exp2(-11.0 + 8.0 * i / 20000 + noise(random));
    run.steps(1, amax, 0x1p8 / amax);
  }
  EXPECT_LE(run.state.skipped, 4);  // torch: 12
}

TEST(HeadroomRule, ALimitThatIsGoneIsForgotten) {
  Training run;
  run.steps(1000, 0.1, 0x1p13);
  ASSERT_EQ(run.state.scale, 0x1p12f);
  run.steps(60000, 0.1);
  EXPECT_EQ(run.state.skipped, 2);
  EXPECT_EQ(run.state.scale, largest_safe(0.1));
}

TEST(HeadroomRule, SpikesThatComeBackAreSkippedOnceNotEachTime) {
  Training run;
  run.steps(3000, 0x1p-6);
  for (int i = 0; i < 40; ++i) {
    run.steps(1, 2.0);
    run.steps(299, 0x1p-6);
  }
  EXPECT_LE(run.state.skipped, 8);  // until one was seen that fits; torch: 10 and more
  const int64_t before = run.state.skipped;
  for (int i = 0; i < 40; ++i) {
    run.steps(1, 2.0);
    run.steps(299, 0x1p-6);
  }
  EXPECT_EQ(run.state.skipped, before);
}

TEST(HeadroomRule, SpikesThatWereGivenUpAreKnownAgainAtTheFirst) {
  Training run;
  const auto spikes = [&run](int count) {
    for (int i = 0; i < count; ++i) {
      run.steps(1, 2.0);
      run.steps(299, 0x1p-6);
    }
  };
  spikes(40);
  run.steps(6000, 0x1p-6);
  ASSERT_GT(run.state.scale, 16 * largest_safe(2.0));
  const int64_t before = run.state.skipped;
  spikes(40);
  EXPECT_EQ(run.state.skipped, before + 1);
}

TEST(HeadroomRule, ATallPeakIsGivenUpSoonerThanASmallOne) {
  const auto steps_back = [](double peak) {
    Training run;
    run.steps(200, peak);
    int steps = 0;
    for (; run.state.scale < largest_safe(0x1p-1) && steps < 20000; ++steps) run.steps(1, 0x1p-1);
    EXPECT_EQ(run.state.skipped, 1);  // the first
    return steps;
  };
  EXPECT_GT(steps_back(0x1p0), 2 * steps_back(0x1p3));
}

TEST(HeadroomRule, AJumpDownIsFollowedWithinAFewThousandSteps) {
  Training run;
  run.steps(4000, 2.0);
  run.steps(4000, 0x1p-7);
  EXPECT_EQ(run.state.skipped, 1);  // the first
  EXPECT_EQ(run.state.scale, largest_safe(0x1p-7));
}

TEST(HeadroomRule, AnOverflowOutOfTheBlueAfterALongTimeChangesNothing) {
  Training run;
  run.steps(20000, 0.1);
  const float before = run.state.scale;
  run.steps(1, 0.1, 1.0);
  EXPECT_LT(run.state.scale, before);
  run.steps(20, 0.1);
  EXPECT_EQ(run.state.scale, before);
}

TEST(HeadroomRule, BadBatchesThatNoScaleHelpsDoNotDragTheScaleDown) {
  Training run;
  for (int i = 0; i < 100; ++i) {
    run.steps(3000, 0.1);
    run.steps(3, 0.1, 0x1p-126);
  }
  run.steps(3000, 0.1);
  EXPECT_EQ(run.state.skipped, 300);
  EXPECT_GE(run.state.scale, largest_safe(0.1) / 4.0f);
}

TEST(HeadroomRule, NeitherDoesASingleOneEveryTwoThousandStepsOrMore) {
  for (const int pace : {2002, 2300, 2900, 3500, 5000, 17000}) {
    Training run;
    for (int i = 0; i < 1000000 / pace; ++i) {
      run.steps(pace - 1, 0.1);
      run.steps(1, 0.1, 0x1p-126);
    }
    run.steps(100, 0.1);
    EXPECT_GE(run.state.scale, largest_safe(0.1) / 4.0f) << pace;
  }
}

TEST(HeadroomRule, NorDoSingleOnesAtRandom) {
  for (const int mean : {2500, 4000, 8000}) {
    double below = 0.0;
    for (uint32_t seed = 1; seed <= 5; ++seed) {
      std::mt19937 random(seed);
      std::bernoulli_distribution bad(1.0 / mean);
      Training run;
      run.steps(10000, 0.1);
      for (int i = 0; i < 100000; ++i) {
        run.steps(1, 0.1, bad(random) ? 0x1p-126 : HUGE_VAL);
        below += std::log2(largest_safe(0.1) / run.state.scale) / 500000.0;
      }
    }
    EXPECT_LT(below, 3.0) << mean;
  }
}

TEST(HeadroomRule, OverflowInsideBackwardIsFoundInAFewSkipsHoweverFarInside) {
  for (int inside = 0; inside <= 40; ++inside) {
    for (int right = -20; right <= 15; ++right) {
      Training run;
      const double limit = std::exp2(right + 1);               // backward overflows from there on,
      const double amax = kLimit / limit / std::exp2(inside);  // with gradients of this size
      run.steps(3000, amax, limit);
      const int skipped = static_cast<int>(run.state.skipped);
      EXPECT_LE(skipped, 4) << inside << " " << right;
      EXPECT_LE(run.state.scale, std::exp2(static_cast<float>(right)));
      EXPECT_GE(run.state.scale, std::exp2(static_cast<float>(right - 1)))
          << inside << " " << right;
    }
  }
}

TEST(HeadroomRule, GradientsBeyondTheLimitThatPassShowThatTheirFormatIsWider) {
  Training run;
  for (int i = 0; i < 1000; ++i) {
    const double amax = 1e6;  // FP32 gradients at scale 65536
    run.state = next_state(run.policy, run.state, {false, amax * run.state.scale}).state;
  }
  EXPECT_EQ(run.state.scale, 32768.0f);  // one bit of care, not twenty
}

TEST(HeadroomRule, WithoutMeasurementsItFindsALimitAndKeepsToIt) {
  Training run;
  for (int i = 0; i < 40000; ++i) {
    run.state = next_state(run.policy, run.state, run.state.scale >= 0x1p20f).state;
  }
  EXPECT_EQ(run.state.scale, 0x1p19f);
  EXPECT_LE(run.state.skipped, 3);
}

TEST(HeadroomRule, ASingleMeasurementDoesNotMakeEveryOverflowTheFirst) {
  Training blind, measured_once;
  measured_once.steps(1, 1e-4);
  for (Training* run : {&blind, &measured_once}) run->steps(20000, 0.0, 0x1p18f);
  EXPECT_LE(measured_once.state.skipped, blind.state.skipped + 1);
  EXPECT_EQ(measured_once.state.scale, 0x1p17f);
}

TEST(HeadroomRule, AtTheFloorItRaisesTheAlarm) {
  Training run;
  std::vector<Alarm> alarms;
  for (int i = 0; i < 5; ++i) {
    const Transition next = next_state(run.policy, run.state, true);
    run.state = next.state;
    alarms.push_back(next.alarm);
  }
  EXPECT_EQ(alarms, (std::vector<Alarm>{Alarm::kNone, Alarm::kNone, Alarm::kNone, Alarm::kAtFloor,
                                        Alarm::kAtFloor}));
  EXPECT_EQ(run.state.scale, run.policy.min_scale);
  run.steps(3000, 0.1);
  EXPECT_EQ(run.state.scale, largest_safe(0.1));
}

TEST(HeadroomRule, ImpossibleSettingsAreRefusedByName) {
  const auto refuse = [](const std::string& name, const auto& change) {
    ScalePolicy policy = HeadroomScale{};
    change(policy);
    expect_error(ErrorCode::kInvalidArgument, name, [&] { validate(policy); });
  };
  for (const double bad : {-1.0, std::nan(""), HUGE_VAL, 1e-300}) {
    refuse("grad_limit", [&](ScalePolicy& p) { p.grad_limit = bad; });
  }
  refuse("init_scale is 1000; it has to be a power of two",
         [](ScalePolicy& p) { p.init_scale = 1000.0f; });
  refuse("min_scale", [](ScalePolicy& p) { p.min_scale = 3.0f; });
  refuse("max_scale", [](ScalePolicy& p) { p.max_scale = 65535.0f; });
  refuse("peak_window", [](ScalePolicy& p) { p.peak_window = 0; });
  refuse("retry_interval", [](ScalePolicy& p) { p.retry_interval = 0; });
  refuse("growth_interval", [](ScalePolicy& p) { p.growth_interval = 1 << 21; });
  refuse("growth_factor", [](ScalePolicy& p) { p.growth_factor = 4.0; });
  refuse("backoff_factor", [](ScalePolicy& p) { p.backoff_factor = 0.25; });
  refuse("hysteresis", [](ScalePolicy& p) { p.hysteresis = 2; });
  refuse("tolerance", [](ScalePolicy& p) { p.tolerance = 0.5; });
  refuse("late", [](ScalePolicy& p) { p.late = true; });
}

ScalePolicy random_headroom() {
  ScalePolicy policy = HeadroomScale{};
  std::vector<int> exponents = {*rc::gen::inRange(-126, 127), *rc::gen::inRange(-126, 127),
                                *rc::gen::inRange(-126, 127)};
  std::sort(exponents.begin(), exponents.end());
  policy.min_scale = std::ldexp(1.0f, exponents[0]);
  policy.init_scale = std::ldexp(1.0f, exponents[1]);
  policy.max_scale = std::ldexp(1.0f, exponents[2]);
  policy.grad_limit = *rc::gen::element(65504.0, 3.3895313892515355e38, 448.0, 1e300);
  policy.growth_interval = *rc::gen::inRange(1, 300);
  policy.peak_window = *rc::gen::inRange(1, 100);
  policy.retry_interval = *rc::gen::inRange(2, 100);
  validate(policy);
  return policy;
}

// Anything a caller may pass, sane or not.
StepSeen random_step() {
  const double amax =
      std::ldexp(1.0 + *rc::gen::inRange(0, 1000) / 1000.0, *rc::gen::inRange(-1080, 1024));
  return {*rc::gen::weightedElement<bool>({{4, false}, {1, true}}),
          *rc::gen::weightedElement<double>(
              {{9, amax}, {2, 1.0}, {1, 0.0}, {1, std::nan("")}, {1, HUGE_VAL}, {1, -1.0}})};
}

RC_GTEST_PROP(HeadroomProperty, TheScaleIsAPowerOfTwoInBoundsAndAnOverflowShrinksIt, ()) {
  const ScalePolicy policy = random_headroom();
  ScaleState state = initial_state(policy);
  for (int i = 0; i < 300; ++i) {
    const StepSeen seen = random_step();
    const Transition next = next_state(policy, state, seen);
    const Transition again = next_state(policy, state, seen);
    RC_ASSERT(std::memcmp(&next.state.scale, &again.state.scale, sizeof(float)) == 0);
    int exponent = 0;
    RC_ASSERT(std::frexp(next.state.scale, &exponent) == 0.5f);
    RC_ASSERT(allows(policy, next.state.scale) && next.state.pending == next.state.scale);
    if (seen.overflow) {
      RC_ASSERT(next.state.scale < state.scale || state.scale == policy.min_scale);
      RC_ASSERT((next.alarm == Alarm::kAtFloor) == (state.scale == policy.min_scale));
    }
    state = next.state;
    GradScaler scaler(policy);
    if (i % 50 == 0) scaler.load_state(state);  // throws if a value is impossible
  }
}

RC_GTEST_PROP(HeadroomProperty, NeverGrowsToWhereTheSameGradientWouldOverflow, ()) {
  Training run;
  double size = -6.0;
  for (int i = 0; i < 2000; ++i) {
    size += *rc::gen::inRange(-100, 101) / 200.0;
    const double amax = std::exp2(size);
    const StepSeen seen = seen_at(run.state.scale, amax);
    const ScaleState next = next_state(run.policy, run.state, seen).state;
    if (!seen.overflow) {
      RC_ASSERT(amax * next.scale <= kLimit || next.scale == run.policy.min_scale);
    }
    run.state = next;
  }
}

RC_GTEST_PROP(HeadroomProperty, FromAnyStartTheRightScaleIsFoundInAHundredSteps, ()) {
  Training run;
  run.policy.init_scale = std::ldexp(1.0f, *rc::gen::inRange(-24, 33));
  run.state = initial_state(run.policy);
  // Where the right scale is at most 2^16, the last that is climbed to quickly.
  const double amax = std::exp2(*rc::gen::inRange(0, 1000) / 50.0);
  run.steps(100, amax);
  const float right = largest_safe(amax * 1.011);  // 1/64 bit of care
  RC_ASSERT(run.state.scale == right || run.state.scale == largest_safe(amax));
  RC_ASSERT(run.state.skipped <= 4);
}

RC_GTEST_PROP(HeadroomProperty, SavingAndLoadingAtAnyStepContinuesTheSame, ()) {
  Training run;
  const int cut = *rc::gen::inRange(0, 200);
  for (int i = 0; i < cut; ++i) {
    run.state = next_state(run.policy, run.state, random_step()).state;
  }
  GradScaler saved(run.policy);
  saved.load_state(run.state);
  GradScaler loaded;
  loaded.load(saved.save());
  ScaleState resumed = loaded.state();
  for (int i = 0; i < 200; ++i) {
    const StepSeen seen = random_step();
    run.state = next_state(run.policy, run.state, seen).state;
    resumed = next_state(loaded.policy(), resumed, seen).state;
    RC_ASSERT(run.state.scale == resumed.scale);
  }
  saved.load_state(run.state);
  loaded.load_state(resumed);
  RC_ASSERT(saved.save() == loaded.save());
}

}  // namespace
}  // namespace headroom
