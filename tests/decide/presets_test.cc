// The trajectories of the systems that the presets reproduce, step by step: start 1024, interval 3,
// one column a step, the scale after the step's update.
#include "tests/decide/support.h"

namespace headroom {
namespace {

const std::string kAllClean = "000000000000";
const std::string kOneOverflow = "001000000000";
const std::string kStorm = "111000010100";

DynamicScale short_policy(const std::string& name, int32_t hysteresis = 0) {
  DynamicScale policy = preset(name).dynamic();
  policy.init_scale = 1024.0f;
  policy.growth_interval = 3;
  if (hysteresis > 0) policy.hysteresis = hysteresis;
  validate(policy);
  return policy;
}

// The scales after each step, or, with `used`, the scales that each step multiplies by.
std::vector<double> run(const ScalePolicy& policy, const std::string& pattern, bool used = false) {
  std::vector<double> scales;
  ScaleNumbers state = initial_numbers(policy);
  for (const char step : pattern) {
    if (used) scales.push_back(state.scale);
    advance(policy, step == '1', &state);
    if (!used) scales.push_back(state.scale);
  }
  return scales;
}

using Scales = std::vector<double>;

class FamilyA : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Presets, FamilyA,
                         testing::Values("torch", "apex", "apex-hysteresis", "keras", "tf-keras",
                                         "megatron", "fairseq", "jmp", "paddle", "oneflow",
                                         "mindspore", "onnxruntime", "colossalai", "dynamic"),
                         [](const auto& preset_name) {
                           std::string name = preset_name.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(FamilyA, GrowsAfterNCleanStepsAndShrinksAtOnce) {
  const ScalePolicy policy = short_policy(GetParam(), 1);
  EXPECT_EQ(run(policy, kAllClean),
            (Scales{1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096, 8192, 8192, 8192, 16384}));
  EXPECT_EQ(run(policy, kOneOverflow),
            (Scales{1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 2048, 2048, 4096}));
  EXPECT_EQ(run(policy, kStorm), (Scales{512, 256, 128, 128, 128, 256, 256, 128, 128, 64, 64, 64}));
}

TEST(FamilyB, DeepSpeedsFirstGrowthIsOneStepLate) {
  const ScalePolicy policy = short_policy("deepspeed", 1);
  EXPECT_EQ(run(policy, kAllClean),
            (Scales{1024, 1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096, 8192, 8192, 8192}));
  EXPECT_EQ(run(policy, kOneOverflow),
            (Scales{1024, 1024, 512, 512, 512, 512, 1024, 1024, 1024, 2048, 2048, 2048}));
}

TEST(FamilyB, FlaxsEveryGrowthIsOneStepLate) {
  const ScalePolicy policy = short_policy("flax");
  EXPECT_EQ(run(policy, kAllClean),
            (Scales{1024, 1024, 1024, 2048, 2048, 2048, 2048, 4096, 4096, 4096, 4096, 8192}));
  EXPECT_EQ(run(policy, kOneOverflow),
            (Scales{1024, 1024, 512, 512, 512, 512, 1024, 1024, 1024, 1024, 2048, 2048}));
}

TEST(FamilyC, EachDelayRuleOnTheStorm) {
  for (const char* name : {"megatron", "colossalai"}) {
    EXPECT_EQ(run(short_policy(name), kStorm),
              (Scales{1024, 512, 256, 256, 256, 512, 512, 512, 512, 256, 256, 256}))
        << name;
  }
  EXPECT_EQ(run(short_policy("apex-hysteresis"), kStorm),
            (Scales{1024, 512, 256, 256, 256, 512, 512, 512, 512, 512, 512, 512}));
  EXPECT_EQ(run(short_policy("deepspeed"), kStorm),
            (Scales{1024, 512, 256, 256, 256, 256, 512, 512, 512, 256, 256, 256}));
  DynamicScale consecutive = short_policy("deepspeed");
  consecutive.refill_on_clean = true;
  EXPECT_EQ(run(consecutive, kStorm),
            (Scales{1024, 512, 256, 256, 256, 256, 512, 512, 512, 512, 512, 512}));
  EXPECT_EQ(run(short_policy("paddle", 2), kStorm),
            (Scales{1024, 512, 512, 512, 512, 1024, 1024, 1024, 1024, 1024, 1024, 1024}));
}

TEST(MXNet, ANewScaleComesIntoForceOneStepLate) {
  const ScalePolicy policy = short_policy("mxnet");
  EXPECT_EQ(run(policy, kOneOverflow, true),
            (Scales{1024, 1024, 1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 2048}));
  EXPECT_EQ(run(policy, kStorm, true),
            (Scales{1024, 1024, 512, 256, 128, 128, 128, 256, 256, 128, 128, 64}));
}

TEST(Fairseq, ToleratesAShareOfOverflows) {
  DynamicScale policy = preset("fairseq").dynamic();
  policy.init_scale = 1024.0f;
  policy.growth_interval = 100;
  const std::string pattern = "000000010011";
  const auto last_three = [&](double tolerance) {
    policy.tolerance = tolerance;
    const Scales scales = run(policy, pattern);
    return Scales{scales[7], scales[10], scales[11]};
  };
  EXPECT_EQ(last_three(0.25), (Scales{1024, 1024, 512}));
  EXPECT_EQ(last_three(0.0), (Scales{512, 256, 128}));
  EXPECT_EQ(last_three(0.5), (Scales{1024, 1024, 1024}));
}

TEST(Fairseq, NeverUsesItsFloor) {
  ScalePolicy policy = preset("fairseq");
  ScaleNumbers state = initial_numbers(policy);
  for (int i = 0; i < 20; ++i) advance(policy, true, &state);
  EXPECT_EQ(state.scale, 0x1p-13f);  // 2^-14 is below 1e-4
  EXPECT_EQ(advance(policy, true, &state), Alarm::kAtFloor);
}

// Smallest scale after 300 overflows in a row.
TEST(Floors, AreThePeersOrTheLastSafeValue) {
  const std::vector<std::pair<std::string, float>> floors = {{"torch", kSmallestScale},
                                                             {"apex", kSmallestScale},
                                                             {"apex-hysteresis", kSmallestScale},
                                                             {"keras", kSmallestScale},
                                                             {"flax", kSmallestScale},
                                                             {"mxnet", kSmallestScale},
                                                             {"paddle", kSmallestScale},
                                                             {"colossalai", kSmallestScale},
                                                             {"tf-keras", 1.0f},
                                                             {"jmp", 1.0f},
                                                             {"megatron", 1.0f},
                                                             {"deepspeed", 1.0f},
                                                             {"oneflow", 1.0f},
                                                             {"mindspore", 1.0f},
                                                             {"onnxruntime", 1.0f},
                                                             {"dynamic", 1.0f}};
  for (const auto& [name, floor] : floors) {
    const ScalePolicy policy = preset(name);
    ScaleNumbers state = initial_numbers(policy);
    Alarm alarm = Alarm::kNone;
    for (int i = 0; i < 300; ++i) alarm = advance(policy, true, &state);
    EXPECT_EQ(state.scale, floor) << name;
    EXPECT_EQ(alarm, Alarm::kAtFloor) << name;
    EXPECT_TRUE(std::isnormal(inverse(state.scale))) << name;
  }
}

TEST(Ceilings, AreThePeersOrTheLastSafeValue) {
  for (const PresetInfo& info : presets()) {
    ScalePolicy policy = preset(info.name);
    if (policy.if_static() == nullptr) policy.set("growth_interval", 1);
    ScaleNumbers state = initial_numbers(policy);
    for (int i = 0; i < 400; ++i) advance(policy, false, &state);
    const std::string name = info.name;
    const float expected =
        policy.if_static() != nullptr ? policy.init_scale()
        : name == "apex" || name == "mxnet" || name == "onnxruntime" || name == "dynamic" ? 0x1p24f
        : name == "headroom" || name == "headroom-retry"                                  ? 0x1p32f
                                                         : kLargestScale;
    EXPECT_EQ(state.scale, expected) << name;
    EXPECT_TRUE(std::isnormal(inverse(state.scale))) << name;
  }
}

TEST(Presets, HaveTheirSystemsDefaults) {
  struct Default {
    const char* name;
    float init;
    int32_t interval;
    int32_t hysteresis;
  };
  for (const Default& expected : {Default{"torch", 65536, 2000, 1},
                                  {"apex", 65536, 2000, 1},
                                  {"keras", 32768, 2000, 1},
                                  {"tf-keras", 32768, 2000, 1},
                                  {"mxnet", 65536, 2000, 1},
                                  {"megatron", 4294967296.0f, 1000, 2},
                                  {"deepspeed", 65536, 1000, 2},
                                  {"fairseq", 128, 16384, 1},
                                  {"flax", 65536, 2000, 1},
                                  {"paddle", 65536, 2000, 1},
                                  {"oneflow", 65536, 2000, 1},
                                  {"mindspore", 16777216, 2000, 1},
                                  {"onnxruntime", 65536, 2000, 1},
                                  {"colossalai", 65536, 1000, 2},
                                  {"dynamic", 65536, 2000, 1}}) {
    const DynamicScale policy = preset(expected.name).dynamic();
    EXPECT_EQ(policy.init_scale, expected.init) << expected.name;
    EXPECT_EQ(policy.growth_interval, expected.interval) << expected.name;
    EXPECT_EQ(policy.hysteresis, expected.hysteresis) << expected.name;
    EXPECT_EQ(policy.growth_factor, 2.0) << expected.name;
    EXPECT_EQ(policy.backoff_factor, 0.5) << expected.name;
  }
}

TEST(MindSpore, GivesUpAfterMoreThanAThousandInARow) {
  DynamicScale far = preset("mindspore").dynamic();
  ScaleNumbers state = initial_numbers(far);
  // Far from the floor, which has its own alarm.
  state.scale = state.dynamic.pending = kLargestScale;
  far.backoff_factor = 0.99;
  for (int i = 1; i <= 1001; ++i) {
    EXPECT_EQ(advance(far, true, &state), i > 1000 ? Alarm::kSkipsInRow : Alarm::kNone) << i;
  }
}

TEST(Presets, AnUnknownNameIsRefusedWithTheKnownOnes) {
  expect_error(ErrorCode::kInvalidArgument, "megatron", [] { preset("pytorch"); });
  for (const PresetInfo& info : presets()) EXPECT_NO_THROW(validate(preset(info.name)));
}

}  // namespace
}  // namespace headroom
