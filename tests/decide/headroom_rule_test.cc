// The guarantees of the headroom rule, on synthetic traces and on random steps.
#include "decide/headroom_rule.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace headroom::internal {
namespace {

// A batch in FP16: its largest unscaled gradient, and the smallest scale at which an intermediate
// value of backward overflows although all gradients fit.
struct Batch {
  double amax = 0.0;
  double overflow_at = HUGE_VAL;

  bool overflows(float scale) const { return amax * scale >= 65520.0 || scale >= overflow_at; }
};

const Batch kUnfixableBatch = {0.1, 0.0};  // overflows at every scale

struct Counts {
  int64_t skipped = 0;  // batches
  int64_t retried = 0;  // passes that overflowed and were repeated
  int64_t applied = 0;  // batches
  double bits = 0.0;    // sum of log2(scale) over applied batches

  double mean_bits() const { return bits / static_cast<double>(applied); }
};

struct Training : Counts {
  explicit Training(HeadroomScale with = {}) : settings(with), scale(with.init_scale) {}

  HeadroomScale settings;
  HeadroomMemory memory;
  float scale;
  bool at_floor = false;

  // Runs a batch with its retries. True if it is applied.
  bool batch(const Batch& batch) {
    for (;; ++retried) {
      const float used = scale;
      const bool overflow = batch.overflows(used);
      const double amax = overflow ? 0.0 : batch.amax * used;
      const HeadroomResult result = headroom_rule(settings, used, overflow, amax, &memory);
      scale = result.scale;
      at_floor = result.at_floor;
      EXPECT_TRUE(valid(settings, memory));
      if (overflow && headroom_retry(settings, memory)) continue;
      skipped += overflow;
      applied += !overflow;
      if (!overflow) bits += std::log2(used);
      return !overflow;
    }
  }
  void batches(int count, const Batch& same) {
    for (int i = 0; i < count; ++i) batch(same);
  }
};

// The preset `torch`: doubles after 2000 consecutive clean steps, halves on overflow.
struct TorchRule : Counts {
  float scale = 0x1p16f;
  int clean = 0;

  void batch(const Batch& batch) {
    const bool overflow = batch.overflows(scale);
    skipped += overflow;
    applied += !overflow;
    if (!overflow) bits += std::log2(scale);
    clean = overflow ? 0 : clean + 1;
    if (overflow) scale *= 0.5f;
    if (clean == 2000) {
      scale *= 2.0f;
      clean = 0;
    }
  }
};

HeadroomScale with_retry() {
  HeadroomScale settings;
  settings.retry = true;
  return settings;
}

HeadroomScale starting_at(float scale) {
  HeadroomScale settings;
  settings.init_scale = scale;
  return settings;
}

// The largest power-of-two scale at which gradients of this size fit FP16.
float largest_fitting(double amax) {
  return static_cast<float>(std::exp2(std::floor(std::log2(65504.0 / amax))));
}

// The rule's safety margin may halve the scale.
void expect_right_scale(float scale, double amax) {
  EXPECT_LE(scale, largest_fitting(amax)) << amax;
  EXPECT_GE(scale, largest_fitting(amax) / 2.0f) << amax;
}

using Trace = std::function<Batch(int)>;

std::vector<std::pair<std::string, Trace>> common_traces(std::mt19937* random) {
  const auto noise = [random] { return std::normal_distribution<double>(0.0, 0.3)(*random); };
  return {
      {"noisy", [=](int) { return Batch{0.02 * std::exp2(noise())}; }},
      {"falling", [=](int i) { return Batch{0.2 * std::exp2(noise() - i / 2000.0)}; }},
      {"rising", [=](int i) { return Batch{0.003 * std::exp2(noise() + i / 2000.0)}; }},
      {"jumping", [=](int i) { return Batch{std::exp2(noise() + (i / 4000 % 2) * 8.0 - 6.0)}; }},
      {"lone spikes",
       [=](int i) { return Batch{std::exp2(noise() + (i % 3000 == 1500 ? 8.0 : 0.0) - 6.0)}; }}};
}

TEST(HeadroomRule, SkipsNoMoreStepsThanTorchAtAHigherScale) {
  std::mt19937 random(1);
  for (const auto& [name, trace] : common_traces(&random)) {
    Training ours;
    TorchRule torch;
    for (int i = 0; i < 20000; ++i) {
      const Batch batch = trace(i);
      ours.batch(batch);
      torch.batch(batch);
    }
    EXPECT_LE(ours.skipped, torch.skipped) << name;
    EXPECT_GE(ours.mean_bits(), torch.mean_bits()) << name;
  }
}

TEST(HeadroomRule, ExcessiveInitialScaleCostsAtMostFourSkips) {
  for (const double amax : {1.1, 2.0, 50.0, 1000.0}) {
    Training run(starting_at(largest_fitting(amax) * 0x1p16f));
    run.batches(100, {amax});
    EXPECT_LE(run.skipped, 4) << amax;
    expect_right_scale(run.scale, amax);
  }
}

TEST(HeadroomRule, ExcessiveInitialScaleInsideBackwardCostsAtMostFourSkips) {
  for (int limit = -10; limit <= 15; ++limit) {
    Training run(starting_at(std::ldexp(1.0f, limit + 16)));
    run.batches(200, {1e-4, std::exp2(limit)});
    EXPECT_LE(run.skipped, 4) << limit;
    EXPECT_EQ(run.scale, std::ldexp(0.5f, limit));
  }
}

TEST(HeadroomRule, LowInitialScaleDoublesEveryCleanStep) {
  Training run(starting_at(0x1p-10f));
  run.batches(26, {0.5});
  EXPECT_EQ(run.scale, 0x1p16f);
  Training large(starting_at(0x1p-10f));
  large.batches(26, {300.0});
  EXPECT_EQ(large.skipped, 0);
  expect_right_scale(large.scale, 300.0);
}

TEST(HeadroomRule, GradientJumpCostsAtMostTwoSkips) {
  for (int jump = 1; jump <= 24; ++jump) {
    Training run;
    run.batches(3000, {0.01});
    ASSERT_EQ(run.skipped, 0);
    run.batches(300, {std::ldexp(0.01, jump)});
    EXPECT_LE(run.skipped, 2) << jump;
    expect_right_scale(run.scale, std::ldexp(0.01, jump));
  }
}

TEST(HeadroomRule, SlowlyRisingGradientsLowerTheScaleBeforeOverflow) {
  Training run;
  for (int i = 0; i < 10000; ++i) run.batch({std::exp2(-8.0 + i / 1000.0)});
  EXPECT_EQ(run.skipped, 0);
  expect_right_scale(run.scale, 4.0);
}

TEST(HeadroomRule, ScaleFollowsFallingGradientsAfterAnExcessiveStart) {
  Training run(starting_at(0x1p32f));
  for (int i = 0; i < 4000; ++i) run.batch({std::exp2(8.0 - i / 400.0)});
  EXPECT_LE(run.skipped, 4);
  EXPECT_GE(run.scale, largest_fitting(0x1p-2) / 4.0f);
}

// Modelled on a recorded run of a convolutional network: falling gradients with isolated peaks.
TEST(HeadroomRule, FallingGradientsWithPeaksCostAtMostOneSkipPerRun) {
  int64_t skipped = 0;
  double bits_above_torch = 0.0;  // of the mean scale, summed over the runs
  for (uint32_t seed = 1; seed <= 5; ++seed) {
    std::mt19937 random(seed);
    std::exponential_distribution<double> peak(2.0 * std::log(2.0));
    Training ours;
    TorchRule torch;
    for (int i = 0; i < 20000; ++i) {
      const Batch batch = {std::exp2(-8.0 - i / 2000.0 + peak(random))};
      ours.batch(batch);
      torch.batch(batch);
    }
    skipped += ours.skipped;
    bits_above_torch += ours.mean_bits() - torch.mean_bits();
  }
  EXPECT_LE(skipped, 5);
  EXPECT_GE(bits_above_torch, 0.0);
}

TEST(HeadroomRule, OverflowInsideBackwardIsNotRepeated) {
  const std::vector<std::pair<double, double>> limits = {// scale limit, spread of its log2
                                                         {0x1p18, 0.0},
                                                         {0x1p13, 0.0},
                                                         {0x1p6, 0.0},
                                                         {0x1p13, 0.3},
                                                         {0x1p6, 0.3}};
  for (const auto& [limit, spread] : limits) {
    int64_t ours_skipped = 0, torch_skipped = 0;
    for (uint32_t seed = 1; seed <= 5; ++seed) {
      std::mt19937 random(seed);
      std::normal_distribution<double> noise;
      Training ours;
      TorchRule torch;
      for (int i = 0; i < 20000; ++i) {
        const Batch batch = {1e-4, limit * std::exp2(spread * noise(random))};
        ours.batch(batch);
        torch.batch(batch);
      }
      ours_skipped += ours.skipped;
      torch_skipped += torch.skipped;
      EXPECT_GE(ours.mean_bits(), torch.mean_bits() - 0.5) << limit << " " << spread;
    }
    EXPECT_LT(ours_skipped, torch_skipped) << limit << " " << spread;
  }
}

TEST(HeadroomRule, FindsTheLargestScaleWithoutMeasurements) {
  Training run;
  run.batches(20000, {0.0, 0x1p20});
  EXPECT_EQ(run.scale, 0x1p19f);
  EXPECT_LE(run.skipped, 6);
}

TEST(HeadroomRule, ToleratesMissingMeasurements) {
  Training run;
  for (int i = 0; i < 5000; ++i) run.batch({i % 2 == 0 ? 3.0 : 0.0});
  expect_right_scale(run.scale, 3.0);
  EXPECT_LE(run.skipped, 1);  // 2^16 is too high at the start
}

TEST(HeadroomRule, FiniteGradientsAboveTheLimitDoNotLowerTheScale) {
  const HeadroomScale settings;
  HeadroomMemory memory;
  float scale = settings.init_scale;
  for (int i = 0; i < 200; ++i) {  // FP32 gradients, summed over micro-batches
    scale = headroom_rule(settings, scale, false, 1e6, &memory).scale;
  }
  EXPECT_GE(scale, settings.init_scale);
}

TEST(HeadroomRule, ScaleRecoversAfterUnfixableBatches) {
  for (const int consecutive : {1, 3}) {
    Training run;
    run.batches(5000, {0.1});
    const float before = run.scale;
    run.batches(consecutive, kUnfixableBatch);
    EXPECT_EQ(run.skipped, consecutive);
    run.batches(50, {0.1});
    EXPECT_GE(run.scale, before / 2.0f);
    run.batches(1000, {0.1});
    EXPECT_EQ(run.scale, before);
    EXPECT_EQ(run.skipped, consecutive);
  }
}

TEST(HeadroomRule, RareUnfixableBatchesDoNotLowerTheMeanScale) {
  for (const int period :
       {2100, 3000, 7000}) {  // with a period below 2000, torch's scale only falls
    Training run;
    for (int i = 0; i < 200000; ++i) run.batch(i % period == 0 ? kUnfixableBatch : Batch{0.1});
    EXPECT_GE(run.mean_bits(), 16.0) << period;
  }
}

TEST(HeadroomRule, OverflowAtTheFloorIsReportedAndTheScaleRecovers) {
  Training run;
  int skips = 0;
  for (; !run.at_floor && skips < 10; ++skips) run.batch(kUnfixableBatch);
  EXPECT_LE(skips, 5);
  EXPECT_EQ(run.scale, run.settings.min_scale);
  run.batches(1, {0.1});
  EXPECT_FALSE(run.at_floor);
  run.batches(100, {0.1});
  EXPECT_GE(run.scale, run.settings.init_scale / 2.0f);
}

TEST(HeadroomRetry, EveryBatchThatFitsSomeScaleIsApplied) {
  std::mt19937 random(1);
  std::vector<std::pair<std::string, Trace>> traces = common_traces(&random);
  traces.emplace_back("any", [&random](int) {
    return Batch{std::exp2(std::uniform_real_distribution<double>(-30, 38)(random)),
                 std::exp2(std::uniform_real_distribution<double>(-23, 40)(random))};
  });
  for (const auto& [name, trace] : traces) {
    Training run(with_retry());
    for (int i = 0; i < 5000; ++i) EXPECT_TRUE(run.batch(trace(i))) << name;
    const int64_t few = name == "any" ? 50000 : 50;  // 1 % of the passes
    EXPECT_LE(run.retried, few) << name;
  }
}

TEST(HeadroomRetry, FirstRetryUsesHalfTheScale) {
  Training run(with_retry());
  run.batches(5000, {0.1});
  const float before = run.scale;
  EXPECT_TRUE(run.batch({0.1, before}));
  EXPECT_EQ(run.retried, 1);
  EXPECT_EQ(run.scale, before / 2.0f);
}

TEST(HeadroomRetry, MeanScaleIsHigherThanWithoutRetry) {
  std::mt19937 random(1);
  for (const auto& [name, trace] : common_traces(&random)) {
    Training retry(with_retry()), plain;
    for (int i = 0; i < 20000; ++i) {
      const Batch batch = trace(i);
      retry.batch(batch);
      plain.batch(batch);
    }
    EXPECT_GT(retry.mean_bits(), plain.mean_bits()) << name;
  }
}

TEST(HeadroomRetry, UnfixableBatchIsSkippedAndTheScaleRestored) {
  Training run(with_retry());
  run.batches(5000, {0.1});
  const float before = run.scale;
  for (int i = 0; i < 4; ++i) {
    run.retried = 0;
    EXPECT_FALSE(run.batch(kUnfixableBatch));
    EXPECT_LE(run.retried, 7);
    EXPECT_EQ(run.scale, before);
    EXPECT_FALSE(run.at_floor);
  }
  EXPECT_TRUE(run.batch({100.0})) << "the retry count starts again for the next batch";
}

TEST(HeadroomRetry, ScaleRecoversFromASingleSpikeWithinTwentySteps) {
  Training run(with_retry());
  run.batches(5000, {0.01});
  const float before = run.scale;
  EXPECT_TRUE(run.batch({10.0}));
  run.batches(20, {0.01});
  EXPECT_GE(run.scale, before / 2.0f);
}

TEST(HeadroomRetry, OverflowInsideBackwardCostsFewRetries) {
  Training run(with_retry());
  run.batches(20000, {1e-3, 0x1p13});
  EXPECT_LE(run.retried, 40);
  EXPECT_EQ(run.skipped, 0);
}

TEST(HeadroomRetry, IsOffByDefault) {
  Training run;
  run.batches(10, kUnfixableBatch);
  EXPECT_EQ(run.retried, 0);
}

TEST(HeadroomMemory, InvalidValuesAreDetected) {
  const HeadroomScale settings;
  EXPECT_TRUE(valid(settings, {}));
  EXPECT_FALSE(valid(settings, {.climb_limit = 127}));
  EXPECT_FALSE(valid(settings, {.climb_limit = -128}));
  EXPECT_FALSE(valid(settings, {.backoff_from = 127}));
  EXPECT_FALSE(valid(settings, {.backoff_from = -127}));
  EXPECT_FALSE(valid(settings, {.clean_steps = 1 << 30}));
  EXPECT_FALSE(valid(settings, {.clean_steps = -1}));
  EXPECT_FALSE(valid(settings, {.clean_steps = -(1 << 30), .pause = 32}));
  for (const int pause : {0, 4, 8, 16, 32}) EXPECT_TRUE(valid(settings, {.pause = pause}));
  for (const int pause : {1, 31, 33, 62}) EXPECT_FALSE(valid(settings, {.pause = pause}));
  EXPECT_FALSE(valid(settings, {.pause = -1}));
  EXPECT_FALSE(valid(settings, {.steps_since_growth = -1}));
  EXPECT_FALSE(valid(settings, {.steps_since_growth = 1 << 30}));
}

HeadroomScale random_settings() {
  std::vector<int> exponents = {*rc::gen::inRange(-126, 127), *rc::gen::inRange(-126, 127),
                                *rc::gen::inRange(-126, 127)};
  std::sort(exponents.begin(), exponents.end());
  HeadroomScale settings;
  settings.min_scale = std::ldexp(1.0f, exponents[0]);
  settings.init_scale = std::ldexp(1.0f, exponents[1]);
  settings.max_scale = std::ldexp(1.0f, exponents[2]);
  settings.grad_limit = *rc::gen::element(65504.0, 3.3895313892515355e38, 448.0, 1e300);
  settings.growth_interval = *rc::gen::element(1, 7, 256, 1 << 20);
  settings.retry = *rc::gen::arbitrary<bool>();
  return settings;
}

// Any double that a caller may pass as a measurement.
double random_amax() {
  const double size =
      std::ldexp(1.0 + *rc::gen::inRange(0, 1000) / 1000.0, *rc::gen::inRange(-1080, 1024));
  return *rc::gen::weightedElement<double>(
      {{9, size}, {2, 1.0}, {1, 0.0}, {1, std::nan("")}, {1, HUGE_VAL}, {1, -1.0}});
}

RC_GTEST_PROP(HeadroomRuleProperty, ScaleIsAPowerOfTwoWithinBounds, ()) {
  const HeadroomScale settings = random_settings();
  HeadroomMemory memory;
  float scale = settings.init_scale;
  int consecutive = 0;
  for (int i = 0; i < 300; ++i) {
    const bool overflow = *rc::gen::weightedElement<bool>({{3, false}, {1, true}});
    const HeadroomResult next =
        headroom_rule(settings, scale, overflow, overflow ? 0.0 : random_amax(), &memory);
    RC_ASSERT(next.scale >= settings.min_scale && next.scale <= settings.max_scale);
    int exponent = 0;
    RC_ASSERT(std::frexp(next.scale, &exponent) == 0.5f);
    RC_ASSERT(valid(settings, memory));
    const bool at_floor = overflow && scale == settings.min_scale;
    RC_ASSERT(next.at_floor == (at_floor && !settings.retry));
    if (overflow && !at_floor) RC_ASSERT(next.scale < scale);
    consecutive = headroom_retry(settings, memory) ? consecutive + 1 : 0;
    RC_ASSERT(consecutive <= 8);
    scale = next.scale;
  }
}

RC_GTEST_PROP(HeadroomRuleProperty, ScaleAfterACleanStepFitsItsGradient, ()) {
  Training run;
  double size = -6.0;
  for (int i = 0; i < 1000; ++i) {
    size += *rc::gen::inRange(-100, 101) / 200.0;
    if (run.batch({std::exp2(size)})) RC_ASSERT(std::exp2(size) * run.scale < 65520.0);
  }
}

}  // namespace
}  // namespace headroom::internal
