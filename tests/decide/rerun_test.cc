// Headroom's rule where the batch of a skipped step is run again.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>
#include <random>

#include "tests/support.h"

namespace headroom {
namespace {

// A batch overflows from this scale on; its largest gradient is `amax`.
struct Batch {
  double amax = 0.0;
  double overflow_at = HUGE_VAL;

  StepSeen at(float scale) const {
    const bool overflow = amax * scale >= 65520.0 || scale >= overflow_at;
    return {overflow, overflow ? 0.0 : amax * scale};
  }
};

struct BatchLoop {
  explicit BatchLoop(const char* name) : policy(preset(name)) {}

  ScalePolicy policy;
  ScaleState state = initial_state(policy);
  int64_t batches = 0, left_out = 0, run_again = 0;
  double bits = 0.0;  // log2 of the scales that were used, all of them added up

  // Whether it was applied, at last.
  bool batch(const Batch& batch) {
    ++batches;
    for (;; ++run_again) {
      const StepSeen seen = batch.at(state.scale);
      const float scale = state.scale;
      state = next_state(policy, state, seen).state;
      if (headroom::run_again(policy, state)) continue;
      left_out += seen.overflow;
      if (!seen.overflow) bits += std::log2(scale);
      return !seen.overflow;
    }
  }
  double mean_bits() const { return bits / static_cast<double>(batches - left_out); }
};

TEST(Rerun, ABatchThatOverflowsIsRunAgainAsLowAsItTakes) {
  BatchLoop run("headroom-rerun");
  for (int i = 0; i < 50; ++i) run.batch({0.9});
  EXPECT_EQ(run.state.scale, 0x1p16f);
  EXPECT_EQ(run.run_again, 0);

  ScaleState state = run.state;
  for (const float lower : {0x1p15f, 0x1p13f, 0x1p10f, 0x1p6f, 0x1p1f, 0x1p-5f, 0x1p-24f}) {
    state = next_state(run.policy, state, StepSeen{true, 0.0}).state;
    EXPECT_EQ(state.scale, lower);
    EXPECT_TRUE(run_again(run.policy, state));
  }

  EXPECT_TRUE(run.batch({40.0})) << "which fits up to 2^10";
  EXPECT_EQ(run.run_again, 3);
  EXPECT_EQ(run.state.scale, 0x1p15f) << "half of what had failed, for the next one";
  EXPECT_FALSE(run_again(run.policy, run.state));
  EXPECT_EQ(run.left_out, 0);
}

TEST(Rerun, ABatchThatNoScaleHelpsIsLeftOutAndTheScaleStays) {
  BatchLoop run("headroom-rerun");
  for (int i = 0; i < 50; ++i) run.batch({0.9});
  const Batch bad = {1.0, 0.0};
  EXPECT_FALSE(run.batch(bad));
  EXPECT_EQ(run.run_again, internal::kTries - 1);
  EXPECT_EQ(run.state.scale, 0x1p16f);
  EXPECT_TRUE(run.batch({0.9}));
  EXPECT_EQ(run.state.scale, 0x1p16f);
  for (int i = 0; i < 100; ++i) {
    run.batch(bad);
    for (int k = 0; k < 20; ++k) EXPECT_TRUE(run.batch({0.9}));
  }
  EXPECT_EQ(run.state.scale, 0x1p16f);
  EXPECT_EQ(run.left_out, 101);
}

TEST(Rerun, AfterABadBatchTheNextOneHasAllItsTries) {
  for (const float floor : {0x1p-24f, 1.0f, 0x1p9f}) {
    BatchLoop run("headroom-rerun");
    run.policy.min_scale = floor;
    for (int i = 0; i < 50; ++i) run.batch({0.9});
    for (int bad = 0; bad < 3; ++bad) EXPECT_FALSE(run.batch({1.0, 0.0}));
    EXPECT_TRUE(run.batch({100.0})) << floor;
  }
}

TEST(Rerun, GradientsThatJumpAnyFarAreFollowed) {
  for (const int bits : {20, 27, 29, 35, 40}) {
    BatchLoop run("headroom-rerun");
    const double before = std::exp2(-12.5), after = before * std::exp2(bits);
    for (int i = 0; i < 5000; ++i) run.batch({before});
    for (int i = 0; i < 100; ++i) EXPECT_TRUE(run.batch({after})) << bits;
    EXPECT_EQ(run.state.scale, std::exp2(28.0f - static_cast<float>(bits))) << bits;
    EXPECT_LE(run.run_again, 20) << bits;
  }
}

TEST(Rerun, WhereBackwardOverflowsOftenIsLearnt) {
  for (const int every : {2, 5, 10, 17, 50}) {
    BatchLoop run("headroom-rerun");
    for (int i = 0; i < 20000; ++i)
      EXPECT_TRUE(run.batch({1e-6, i % every == 0 ? 64.0 : HUGE_VAL}));
    EXPECT_LE(run.run_again, 400) << every << ": 2 % of the passes";
  }
}

TEST(Rerun, AScaleThatIsHeldByHandEndsIt) {
  ScalePolicy policy = preset("headroom-rerun");
  const ScaleState failed = next_state(policy, initial_state(policy), true).state;
  EXPECT_TRUE(run_again(policy, failed));
  policy.dynamic = false;
  EXPECT_FALSE(run_again(policy, failed));
}

TEST(Rerun, FourBadBatchesInARowRaiseTheAlarm) {
  ScalePolicy policy = preset("headroom");
  policy.rerun = true;
  ScaleState state = initial_state(policy);
  for (int pass = 1; pass <= 4 * internal::kTries; ++pass) {
    const Transition next = next_state(policy, state, StepSeen{true, 0.0});
    EXPECT_EQ(next.alarm == Alarm::kSkipsInRow, pass == 4 * internal::kTries) << pass;
    EXPECT_EQ(run_again(policy, next.state), pass % internal::kTries != 0) << pass;
    state = next.state;
  }
}

TEST(Rerun, AtItsFloorABatchIsLeftOutAtOnce) {
  HeadroomScale settings;
  settings.rerun = true;
  settings.min_scale = 0x1p14f;
  const ScalePolicy policy = settings;
  ScaleState state = initial_state(policy);
  int passes = 1;
  for (;; ++passes) {
    state = next_state(policy, state, StepSeen{true, 0.0}).state;
    if (!run_again(policy, state)) break;
    ASSERT_LT(passes, 10);
  }
  EXPECT_EQ(passes, 3) << "2^16, 2^15 and 2^14";
  EXPECT_EQ(state.scale, 0x1p16f);
}

TEST(Rerun, ALevelThatStaysIsFoundWithAFewPasses) {
  BatchLoop run("headroom-rerun");
  for (int i = 0; i < 50; ++i) run.batch({0.9});
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(run.batch({900.0}));
  EXPECT_EQ(run.state.scale, 0x1p6f);
  EXPECT_LE(run.run_again, 12);
  const int64_t before = run.run_again;
  for (int i = 0; i < 5000; ++i) EXPECT_TRUE(run.batch({900.0}));
  EXPECT_EQ(run.run_again, before) << "2^7 is known to be too high";
}

TEST(Rerun, NothingIsGivenUpBeforeItOverflows) {
  BatchLoop run("headroom-rerun"), plain("headroom");
  for (int i = 0; i < 400; ++i) {
    const Batch batch = {i % 100 == 99 ? 0.98 : 0.5};  // both fit 2^16, the first by a hair
    run.batch(batch);
    plain.batch(batch);
  }
  EXPECT_EQ(run.state.scale, 0x1p16f);
  EXPECT_LT(plain.state.scale, 0x1p16f);
}

TEST(Rerun, PoliciesWithoutItNeverAskForIt) {
  for (const PresetInfo& info : presets()) {
    const ScalePolicy policy = preset(info.name);
    const ScaleState next = next_state(policy, initial_state(policy), true).state;
    EXPECT_EQ(run_again(policy, next), std::string(info.name) == "headroom-rerun") << info.name;
  }
  ScalePolicy torch = preset("torch");
  torch.rerun = true;
  expect_error(ErrorCode::kInvalidArgument, "rerun", [&] { validate(torch); });
  ScalePolicy policy = preset("headroom-rerun");
  policy.on_overflow = OnOverflow::kThrow;
  expect_error(ErrorCode::kInvalidArgument, "rerun", [&] { validate(policy); });
}

// Of gradients that scatter, drift, have spikes, or overflow inside backward, no batch is left out,
// the scale is higher than with torch's rule, and few passes are run again.
TEST(Rerun, OnTracesOfEveryKindItIsHigherThanTorchAndLeavesNothingOut) {
  std::mt19937 random(7);
  std::normal_distribution<double> noise(0.0, 0.3);
  const auto chance = [&](double p) { return std::bernoulli_distribution(p)(random); };
  const std::vector<std::pair<const char*, std::function<Batch(int)>>> traces = {
      {"constant", [](int) { return Batch{2.5}; }},
      {"small", [](int) { return Batch{4e-5}; }},
      {"noisy", [&](int) { return Batch{0.7 * std::exp2(noise(random))}; }},
      {"falling", [&](int i) { return Batch{0.2 * std::exp2(noise(random) - i / 2000.0)}; }},
      {"rising", [&](int i) { return Batch{0.003 * std::exp2(noise(random) + i / 2000.0)}; }},
      {"spikes", [&](int) { return Batch{0.02 * (chance(1.0 / 300) ? 100.0 : 1.0)}; }},
      {"lone spikes", [&](int i) { return Batch{0.02 * (i % 3000 == 1500 ? 256.0 : 1.0)}; }},
      {"jumps", [&](int i) { return Batch{0.02 * (i / 4000 % 2 == 1 ? 256.0 : 1.0)}; }},
      {"inside",
       [](int) {
         return Batch{0.1, 10000.0};
       }},
      {"noisy inside",
       [&](int) {
         return Batch{0.1, 10000.0 * std::exp2(noise(random))};
       }},
      {"spikes inside",
       [&](int) {
         return Batch{0.02, chance(1.0 / 300) ? 10000.0 : 3000000.0};
       }},
  };
  for (const auto& [name, make] : traces) {
    BatchLoop ours("headroom-rerun"), torch("torch");
    for (int i = 0; i < 20000; ++i) {
      const Batch batch = make(i);
      ours.batch(batch);
      torch.batch(batch);
    }
    EXPECT_EQ(ours.left_out, 0) << name;
    EXPECT_GE(ours.mean_bits(), torch.mean_bits() - 0.001) << name;
    EXPECT_LE(ours.run_again, 200) << name << ": 1 % of the passes";
  }
}

RC_GTEST_PROP(RerunProperty, AnyBatchEndsAfterAFewTriesAndTheScaleStaysPossible, ()) {
  HeadroomScale settings;
  settings.rerun = true;
  settings.min_scale = std::ldexp(1.0f, *rc::gen::inRange(-126, -20));
  settings.init_scale = std::ldexp(1.0f, *rc::gen::inRange(-20, 20));
  settings.max_scale = std::ldexp(1.0f, *rc::gen::inRange(20, 127));
  settings.growth_interval = *rc::gen::inRange(1, 300);
  const ScalePolicy policy = settings;
  ScaleState state = initial_state(policy);
  for (int i = 0; i < 200; ++i) {
    const Batch batch = {std::exp2(*rc::gen::inRange(-60, 60)),
                         std::exp2(*rc::gen::inRange(-90, 90))};
    int passes = 0;
    bool applied = false;
    do {
      const StepSeen seen = batch.at(state.scale);
      const float before = state.scale;
      state = next_state(policy, state, seen).state;
      applied = !seen.overflow;
      int exponent = 0;
      RC_ASSERT(std::frexp(state.scale, &exponent) == 0.5f && allows(policy, state.scale));
      RC_ASSERT(!run_again(policy, state) || state.scale < before);
      RC_ASSERT(++passes <= internal::kTries);
    } while (run_again(policy, state));
    if (applied) RC_ASSERT(state.skips_in_row == 0);
    if (i % 20 == 0) GradScaler(policy).load_state(state);  // throws if a value is impossible
  }
}

}  // namespace
}  // namespace headroom
