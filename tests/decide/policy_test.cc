// Validation and text form of policies, static scales, floors, and the verdict of a step.
#include "tests/decide/support.h"

namespace headroom {
namespace {

TEST(Policy, InvalidSettingsAreRejectedByName) {
  const auto expect_rejected = [](const std::string& name, const auto& change) {
    DynamicScale policy;
    change(policy);
    expect_error(ErrorCode::kInvalidArgument, name, [&] { validate(policy); });
  };
  for (const float bad : {0.0f, -1.0f, kNan, kInf, -kInf, 1e-45f, 0x1p127f}) {
    expect_rejected("init_scale", [&](DynamicScale& p) { p.init_scale = bad; });
    expect_rejected("min_scale", [&](DynamicScale& p) { p.min_scale = bad; });
    expect_rejected("max_scale", [&](DynamicScale& p) { p.max_scale = bad; });
  }
  for (const double bad : {1.0, 1.0 + 1e-9, 0.5, 0.0, -2.0, std::nan(""), HUGE_VAL}) {
    expect_rejected("growth_factor", [&](DynamicScale& p) { p.growth_factor = bad; });
  }
  for (const double bad : {1.0, 1.0 - 1e-9, 2.0, 0.0, -0.5, std::nan(""), HUGE_VAL}) {
    expect_rejected("backoff_factor", [&](DynamicScale& p) { p.backoff_factor = bad; });
  }
  for (const double bad : {-0.1, 1.1, std::nan("")}) {
    expect_rejected("tolerance", [&](DynamicScale& p) { p.tolerance = bad; });
  }
  expect_rejected("growth_interval", [](DynamicScale& p) { p.growth_interval = 0; });
  expect_rejected("hysteresis", [](DynamicScale& p) { p.hysteresis = 0; });
  expect_rejected("first_growth_extra", [](DynamicScale& p) { p.first_growth_extra = -1; });
  expect_rejected("max_skips_in_row", [](DynamicScale& p) { p.max_skips_in_row = -1; });
  expect_rejected("init_scale", [](DynamicScale& p) { p.init_scale = 0x1p25f; });
  expect_rejected("init_scale", [](DynamicScale& p) { p.init_scale = 0.5f; });
  expect_rejected("max_scale", [](DynamicScale& p) { p.min_scale = 0x1p25f; });
}

TEST(Policy, StaticScaleIsConstantAndCountsSkips) {
  const ScalePolicy policy = StaticScale{128.0f};
  validate(policy);
  ScaleNumbers state = initial_numbers(policy);
  for (int i = 0; i < 5000; ++i) advance(policy, i % 3 == 0, &state);
  EXPECT_EQ(state.scale, 128.0f);
  EXPECT_EQ(state.skipped, 1667);
  EXPECT_EQ(ScalePolicy(NoScale{}).init_scale(), 1.0f);
}

TEST(Policy, RepeatedSkipsAtAStaticScaleRaiseTheAlarm) {
  ScalePolicy policy = StaticScale{.scale = 128.0f, .max_skips_in_row = 3};
  ScaleNumbers state = initial_numbers(policy);
  std::vector<Alarm> alarms;
  for (const bool overflow : {true, true, false, true, true, true, true}) {
    alarms.push_back(advance(policy, overflow, &state));
  }
  EXPECT_EQ(alarms, (std::vector<Alarm>{Alarm::kNone, Alarm::kNone, Alarm::kNone, Alarm::kNone,
                                        Alarm::kNone, Alarm::kSkipsInRow, Alarm::kSkipsInRow}));
}

TEST(Policy, BackoffIsClampedToTheFloor) {
  const ScalePolicy policy = DynamicScale{.init_scale = 4.0f, .min_scale = 3.0f};
  ScaleNumbers state = initial_numbers(policy);
  EXPECT_EQ(advance(policy, true, &state), Alarm::kNone);
  EXPECT_EQ(state.scale, 3.0f);
  EXPECT_EQ(advance(policy, true, &state), Alarm::kAtFloor);
}

TEST(Policy, RoundingDoesNotReachAnExclusiveFloor) {
  const ScalePolicy policy = DynamicScale{.init_scale = 2e-4f,
                                          .backoff_factor = 0.5000000001,
                                          .min_scale = 1e-4f,
                                          .stay_above_min = true};
  ScaleNumbers state = initial_numbers(policy);
  advance(policy, true, &state);
  EXPECT_TRUE(policy.allows(state.scale)) << state.scale;
}

TEST(Verdict, MultiplierIsTheReciprocalOfTheScale) {
  const Verdict verdict = decide(true, 65536.0, 65536.0, 65536.0f, {});
  EXPECT_TRUE(verdict.apply());
  EXPECT_EQ(verdict.multiplier, 0x1p-16f);
  EXPECT_EQ(verdict.grad_norm, 1.0);
  EXPECT_EQ(verdict.clip_factor, 1.0);
}

TEST(Verdict, ClipsTheUnscaledNorm) {
  const Verdict verdict = decide(true, 4.0 * 1024.0, 1024.0, 1024.0f, {1.0});
  EXPECT_NEAR(verdict.clip_factor, 1.0 / (4.0 + 1e-6), 1e-12);
  EXPECT_FLOAT_EQ(verdict.multiplier, static_cast<float>(verdict.clip_factor / 1024.0));
  EXPECT_EQ(decide(true, 0.5 * 1024.0, 1.0, 1024.0f, {1.0}).clip_factor, 1.0);
}

TEST(Verdict, NonFiniteGradientsAreSkipped) {
  const Verdict verdict = decide(false, HUGE_VAL, 1.0, 1024.0f, {1.0});
  EXPECT_EQ(verdict.skip, Skip::kNotFinite);
  EXPECT_FALSE(verdict.apply());
}

TEST(Verdict, OverflowWhileUnscalingIsSkipped) {
  EXPECT_EQ(decide(true, 1e30, 1e30, 0x1p-40f, {1.0}).skip, Skip::kUnscaleOverflow);
  EXPECT_TRUE(decide(true, 1e20, 1e20, 0x1p-40f, {1.0}).apply());
}

TEST(Verdict, NormAboveTheLimitIsSkippedAndIsNotAnOverflow) {
  const Verdict verdict = decide(true, 5.0 * 1024.0, 1024.0, 1024.0f, {0.0, 4.0});
  EXPECT_EQ(verdict.skip, Skip::kNormTooLarge);
  EXPECT_EQ(verdict.grad_norm, 5.0);
  EXPECT_FALSE(internal::overflowed(verdict.skip));
  EXPECT_TRUE(decide(true, 4.0 * 1024.0, 1024.0, 1024.0f, {0.0, 4.0}).apply());
  EXPECT_EQ(decide(false, HUGE_VAL, 1.0, 1024.0f, {0.0, 4.0}).skip, Skip::kNotFinite);
}

TEST(Verdict, ReciprocalIsComputedInDouble) {
  EXPECT_EQ(inverse(3.0f), static_cast<float>(1.0 / 3.0));
  EXPECT_EQ(inverse(kSmallestScale), 0x1p126f);
  EXPECT_EQ(inverse(kLargestScale), kSmallestScale);
}

TEST(PolicyText, EverySettingCanBeReadAndWrittenByName) {
  for (const SettingInfo& info : policy_settings()) {
    ScalePolicy policy = preset(to_string(info.rule));
    const double value = policy.get(info.name);
    const std::string set = to_string(info.rule) + (":" + std::string(info.name)) + "=";
    EXPECT_EQ(parse_policy(set + info.default_value).get(info.name), value);
    policy.set(info.name, value);
    EXPECT_NE(std::string(info.summary), "");
  }
  ScalePolicy policy = preset("torch");
  policy.set("growth_interval", 7);
  EXPECT_EQ(policy.if_dynamic()->growth_interval, 7);
  expect_error(ErrorCode::kInvalidArgument, "growth_intervall",
               [&] { policy.get("growth_intervall"); });
  expect_error(ErrorCode::kInvalidArgument, "backoff_factor", [&] { policy.set("retry", 1); });
  for (const double bad : {0.5, 3e9, HUGE_VAL, std::nan("")}) {
    expect_error(ErrorCode::kInvalidArgument, "growth_interval",
                 [&] { policy.set("growth_interval", bad); });
  }
  expect_error(ErrorCode::kInvalidArgument, "late", [&] { policy.set("late", 2); });
}

TEST(PolicyText, RoundTripsExactly) {
  for (const PresetInfo& info : presets()) {
    const ScalePolicy policy = preset(info.name);
    EXPECT_EQ(to_string(parse_policy(to_string(policy))), to_string(policy)) << info.name;
  }
  const DynamicScale rule = parse_policy("megatron:growth_factor=1.1,late=true").dynamic();
  EXPECT_EQ(rule.growth_factor, 1.1);
  EXPECT_TRUE(rule.late);
  EXPECT_EQ(rule.hysteresis, 2);
  EXPECT_EQ(parse_policy("static:512").init_scale(), 512.0f);
  EXPECT_EQ(parse_policy("static:scale=512,on_overflow=throw").on_overflow(), OnOverflow::kThrow);
}

TEST(PolicyText, InvalidTextIsRejected) {
  for (const char* bad :
       {"", "tourch", "torch:growth_interval", "torch:growth_interval=", "torch:growth_interval=x",
        "torch:growth_interval=5 ", "static:1e999", "torch:growth_interval=0", "static:0",
        "static:nan", "torch:5", "headroom:init_scale=3", "torch:,"}) {
    expect_error(ErrorCode::kInvalidArgument, "", [&] { parse_policy(bad); });
  }
}

}  // namespace
}  // namespace headroom
