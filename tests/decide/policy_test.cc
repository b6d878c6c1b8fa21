#include "tests/support.h"

namespace headroom {
namespace {

TEST(Policy, EveryImpossibleSettingIsRefusedByName) {
  const auto refuse = [](const std::string& name, const auto& change) {
    ScalePolicy policy;
    change(policy);
    expect_error(ErrorCode::kInvalidArgument, name, [&] { validate(policy); });
  };
  for (const float bad : {0.0f, -1.0f, kNan, kInf, -kInf, 1e-45f, 0x1p127f}) {
    refuse("init_scale", [&](ScalePolicy& p) { p.init_scale = bad; });
    refuse("min_scale", [&](ScalePolicy& p) { p.min_scale = bad; });
    refuse("max_scale", [&](ScalePolicy& p) { p.max_scale = bad; });
  }
  for (const double bad : {1.0, 1.0 + 1e-9, 0.5, 0.0, -2.0, std::nan(""), HUGE_VAL}) {
    refuse("growth_factor", [&](ScalePolicy& p) { p.growth_factor = bad; });
  }
  for (const double bad : {1.0, 1.0 - 1e-9, 2.0, 0.0, -0.5, std::nan(""), HUGE_VAL}) {
    refuse("backoff_factor", [&](ScalePolicy& p) { p.backoff_factor = bad; });
  }
  for (const double bad : {-0.1, 1.1, std::nan("")}) {
    refuse("tolerance", [&](ScalePolicy& p) { p.tolerance = bad; });
  }
  refuse("growth_interval", [](ScalePolicy& p) { p.growth_interval = 0; });
  refuse("hysteresis", [](ScalePolicy& p) { p.hysteresis = 0; });
  refuse("first_growth_extra", [](ScalePolicy& p) { p.first_growth_extra = -1; });
  refuse("max_skips_in_row", [](ScalePolicy& p) { p.max_skips_in_row = -1; });
  refuse("init_scale", [](ScalePolicy& p) { p.init_scale = 0x1p25f; });
  refuse("init_scale", [](ScalePolicy& p) { p.init_scale = 0.5f; });
  refuse("max_scale", [](ScalePolicy& p) { p.min_scale = 0x1p25f; });
}

TEST(Policy, StaticNeverMovesAndStillCounts) {
  const ScalePolicy policy = StaticScale{128.0f};
  validate(policy);
  ScaleState state = initial_state(policy);
  for (int i = 0; i < 5000; ++i) state = next_state(policy, state, i % 3 == 0).state;
  EXPECT_EQ(state.scale, 128.0f);
  EXPECT_EQ(state.skipped, 1667);
  EXPECT_EQ(ScalePolicy(NoScale{}).init_scale, 1.0f);
}

TEST(Policy, AStaticScaleThatAlwaysOverflowsRaisesTheAlarm) {
  ScalePolicy policy = StaticScale{.scale = 128.0f, .max_skips_in_row = 3};
  ScaleState state = initial_state(policy);
  std::vector<Alarm> alarms;
  for (const bool overflow : {true, true, false, true, true, true, true}) {
    const Transition next = next_state(policy, state, overflow);
    state = next.state;
    alarms.push_back(next.alarm);
  }
  EXPECT_EQ(alarms, (std::vector<Alarm>{Alarm::kNone, Alarm::kNone, Alarm::kNone, Alarm::kNone,
                                        Alarm::kNone, Alarm::kSkipsInRow, Alarm::kSkipsInRow}));
}

TEST(Policy, TheLastStepToTheFloorIsTakenInPart) {
  ScalePolicy policy;
  policy.min_scale = 3.0f;
  policy.init_scale = 4.0f;
  const Transition next = next_state(policy, initial_state(policy), true);
  EXPECT_EQ(next.state.scale, 3.0f);
  EXPECT_EQ(next.alarm, Alarm::kNone);
  EXPECT_EQ(next_state(policy, next.state, true).alarm, Alarm::kAtFloor);
}

TEST(Floor, WhoStaysAboveItDoesNotReachItByRoundingEither) {
  ScalePolicy policy;
  policy.stay_above_min = true;
  policy.min_scale = 1e-4f;
  policy.init_scale = 2e-4f;
  policy.backoff_factor = 0.5000000001;
  const Transition next = next_state(policy, initial_state(policy), true);
  EXPECT_TRUE(allows(policy, next.state.scale)) << next.state.scale;
}

TEST(Verdict, UnscalesByTheReciprocal) {
  const Verdict verdict = decide(true, 65536.0, 65536.0, 65536.0f, 0.0);
  EXPECT_TRUE(verdict.apply());
  EXPECT_EQ(verdict.multiplier, 0x1p-16f);
  EXPECT_EQ(verdict.grad_norm, 1.0);
  EXPECT_EQ(verdict.clip_factor, 1.0);
}

TEST(Verdict, ClipsTheUnscaledNorm) {
  const Verdict verdict = decide(true, 4.0 * 1024.0, 1024.0, 1024.0f, 1.0);
  EXPECT_NEAR(verdict.clip_factor, 1.0 / (4.0 + 1e-6), 1e-12);
  EXPECT_FLOAT_EQ(verdict.multiplier, static_cast<float>(verdict.clip_factor / 1024.0));
  EXPECT_EQ(decide(true, 0.5 * 1024.0, 1.0, 1024.0f, 1.0).clip_factor, 1.0);
}

TEST(Verdict, NotFiniteIsSkipped) {
  const Verdict verdict = decide(false, HUGE_VAL, 1.0, 1024.0f, 1.0);
  EXPECT_EQ(verdict.skip, Skip::kNotFinite);
  EXPECT_FALSE(verdict.apply());
}

TEST(Verdict, UnscalingThatWouldOverflowIsSkipped) {
  EXPECT_EQ(decide(true, 1e30, 1e30, 0x1p-40f, 1.0).skip, Skip::kUnscaleOverflow);
  EXPECT_TRUE(decide(true, 1e20, 1e20, 0x1p-40f, 1.0).apply());
}

TEST(Verdict, TheReciprocalIsFormedInDouble) {
  EXPECT_EQ(inverse(3.0f), static_cast<float>(1.0 / 3.0));
  EXPECT_EQ(inverse(kSmallestScale), 0x1p126f);
  EXPECT_EQ(inverse(kLargestScale), kSmallestScale);
}

}  // namespace
}  // namespace headroom
