// Each preset reproduces the scale trajectory of its system. Trajectories start at 1024 with a
// growth interval of 3. In a pattern, 1 is a step that overflows and 0 a clean one.
#include <random>

#include "tests/decide/support.h"

namespace headroom {
namespace {

const std::string kAllClean = "000000000000";
const std::string kOneOverflow = "001000000000";
const std::string kManyOverflows = "111000010100";

DynamicScale short_interval_policy(const std::string& name, int32_t hysteresis = 0) {
  DynamicScale policy = preset(name).dynamic();
  policy.init_scale = 1024.0f;
  policy.growth_interval = 3;
  if (hysteresis > 0) policy.hysteresis = hysteresis;
  validate(policy);
  return policy;
}

// The scales after each update or, with `used`, the scales that each step multiplies the loss by.
std::vector<double> trajectory(const ScalePolicy& policy, const std::string& pattern,
                               bool used = false) {
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

class DynamicPreset : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, DynamicPreset,
                         testing::Values("torch", "precision-rl", "apex", "apex-hysteresis",
                                         "keras", "tf-keras", "megatron", "verl-megatron",
                                         "fairseq", "fairseq2", "jmp", "paddle", "oneflow",
                                         "mindspore", "onnxruntime", "colossalai", "dynamic"),
                         [](const auto& preset_name) {
                           std::string name = preset_name.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(DynamicPreset, GrowsAfterTheIntervalAndBacksOffImmediately) {
  const ScalePolicy policy = short_interval_policy(GetParam(), 1);
  EXPECT_EQ(trajectory(policy, kAllClean),
            (Scales{1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096, 8192, 8192, 8192, 16384}));
  EXPECT_EQ(trajectory(policy, kOneOverflow),
            (Scales{1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 2048, 2048, 4096}));
  EXPECT_EQ(trajectory(policy, kManyOverflows),
            (Scales{512, 256, 128, 128, 128, 256, 256, 128, 128, 64, 64, 64}));
}

TEST(Presets, DeepSpeedDelaysItsFirstGrowthByOneStep) {
  const ScalePolicy policy = short_interval_policy("deepspeed", 1);
  EXPECT_EQ(trajectory(policy, kAllClean),
            (Scales{1024, 1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096, 8192, 8192, 8192}));
  EXPECT_EQ(trajectory(policy, kOneOverflow),
            (Scales{1024, 1024, 512, 512, 512, 512, 1024, 1024, 1024, 2048, 2048, 2048}));
}

TEST(Presets, FlaxDelaysEveryGrowthByOneStep) {
  const ScalePolicy policy = short_interval_policy("flax");
  EXPECT_EQ(trajectory(policy, kAllClean),
            (Scales{1024, 1024, 1024, 2048, 2048, 2048, 2048, 4096, 4096, 4096, 4096, 8192}));
  EXPECT_EQ(trajectory(policy, kOneOverflow),
            (Scales{1024, 1024, 512, 512, 512, 512, 1024, 1024, 1024, 1024, 2048, 2048}));
}

TEST(Presets, HysteresisMatchesEachSystem) {
  for (const char* name : {"megatron", "verl-megatron", "colossalai"}) {
    EXPECT_EQ(trajectory(short_interval_policy(name), kManyOverflows),
              (Scales{1024, 512, 256, 256, 256, 512, 512, 512, 512, 256, 256, 256}))
        << name;
  }
  EXPECT_EQ(trajectory(short_interval_policy("apex-hysteresis"), kManyOverflows),
            (Scales{1024, 512, 256, 256, 256, 512, 512, 512, 512, 512, 512, 512}));
  EXPECT_EQ(trajectory(short_interval_policy("deepspeed"), kManyOverflows),
            (Scales{1024, 512, 256, 256, 256, 256, 512, 512, 512, 256, 256, 256}));
  DynamicScale consecutive = short_interval_policy("deepspeed");
  consecutive.refill_on_clean = true;
  EXPECT_EQ(trajectory(consecutive, kManyOverflows),
            (Scales{1024, 512, 256, 256, 256, 256, 512, 512, 512, 512, 512, 512}));
  EXPECT_EQ(trajectory(short_interval_policy("paddle", 2), kManyOverflows),
            (Scales{1024, 512, 512, 512, 512, 1024, 1024, 1024, 1024, 1024, 1024, 1024}));
}

TEST(Presets, MxnetAppliesANewScaleOneStepLate) {
  const ScalePolicy policy = short_interval_policy("mxnet");
  EXPECT_EQ(trajectory(policy, kOneOverflow, true),
            (Scales{1024, 1024, 1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 2048}));
  EXPECT_EQ(trajectory(policy, kManyOverflows, true),
            (Scales{1024, 1024, 512, 256, 128, 128, 128, 256, 256, 128, 128, 64}));
}

TEST(Presets, FairseqToleratesAFractionOfOverflows) {
  DynamicScale policy = preset("fairseq").dynamic();
  policy.init_scale = 1024.0f;
  policy.growth_interval = 100;
  const std::string pattern = "000000010011";
  const auto last_three = [&](double tolerance) {
    policy.tolerance = tolerance;
    const Scales scales = trajectory(policy, pattern);
    return Scales{scales[7], scales[10], scales[11]};
  };
  EXPECT_EQ(last_three(0.25), (Scales{1024, 1024, 512}));
  EXPECT_EQ(last_three(0.0), (Scales{512, 256, 128}));
  EXPECT_EQ(last_three(0.5), (Scales{1024, 1024, 1024}));
}

TEST(Presets, FairseqStaysAboveItsFloor) {
  ScalePolicy policy = preset("fairseq");
  ScaleNumbers state = initial_numbers(policy);
  for (int i = 0; i < 20; ++i) advance(policy, true, &state);
  EXPECT_EQ(state.scale, 0x1p-13f);  // 2^-14 is below 1e-4
  EXPECT_EQ(advance(policy, true, &state), Alarm::kAtFloor);
}

// Overflows in runs of up to `most`, with clean runs of up to 3000 steps between them.
std::vector<bool> long_pattern(int most, int steps) {
  std::vector<bool> overflows;
  std::mt19937 random(1);
  while (static_cast<int>(overflows.size()) < steps) {
    overflows.insert(overflows.end(), 1 + random() % most, true);
    overflows.insert(overflows.end(), random() % 3000, false);
  }
  return overflows;
}

// torch.amp.GradScaler in one function, as the peers below call it.
void torch_update(bool overflow, float* scale, int* clean) {
  *clean = overflow ? 0 : *clean + 1;
  if (overflow) *scale *= 0.5f;
  if (*clean == 2000) {
    *scale *= 2.0f;
    *clean = 0;
  }
}

// fairseq2 updates torch's scaler and then sets a scale that is too small to 1e-4.
TEST(Presets, Fairseq2SetsTheFloorAfterTheUpdate) {
  const ScalePolicy policy = preset("fairseq2");
  ScaleNumbers state = initial_numbers(policy);
  float scale = 65536.0f, lowest = scale;
  int clean = 0;
  for (const bool overflow : long_pattern(20, 100000)) {
    torch_update(overflow, &scale, &clean);
    if (scale < 1e-4f) scale = 1e-4f;
    advance(policy, overflow, &state);
    ASSERT_EQ(state.scale, scale) << "step " << state.steps;
    lowest = std::min(lowest, scale);
  }
  EXPECT_EQ(lowest, 1e-4f);
}

// icefall doubles torch's scale by hand after some batches, and leaves torch's count as it is.
TEST(Presets, IcefallDoublesSmallScalesOnItsSchedule) {
  const ScalePolicy policy = preset("icefall");
  ScaleNumbers state = initial_numbers(policy);
  float scale = 1.0f, lowest = scale, highest = scale;
  int clean = 0, batch = 0;
  for (const bool overflow : long_pattern(6, 100000)) {
    torch_update(overflow, &scale, &clean);
    ASSERT_GE(scale, 1e-5f) << "icefall ends the run here";
    if ((batch % 25 == 0 && scale < 2.0f) || (batch % 100 == 0 && scale < 8.0f) ||
        (batch % 400 == 0 && scale < 32.0f)) {
      scale *= 2.0f;
    }
    ++batch;
    advance(policy, overflow, &state);
    ASSERT_EQ(state.scale, scale) << "batch " << batch;
    lowest = std::min(lowest, scale);
    highest = std::max(highest, scale);
  }
  EXPECT_LT(lowest, 1.0f);
  EXPECT_GT(highest, 32.0f);
}

TEST(Presets, IcefallRaisesTheAlarmBelowItsSmallestScale) {
  const ScalePolicy policy = preset("icefall");
  ScaleNumbers state = initial_numbers(policy);
  Alarm alarm = advance(policy, false, &state);  // batch 0 doubles
  int overflows = 0;
  for (; alarm == Alarm::kNone; ++overflows) alarm = advance(policy, true, &state);
  EXPECT_EQ(alarm, Alarm::kAtFloor);
  EXPECT_EQ(overflows, 18);  // from 2 to 2^-16, and the one that would reach 2^-17, below 1e-5
  EXPECT_EQ(state.scale, 0x1p-16f);
}

// The scale after 300 consecutive overflows: the floor of the system or, if it has none, ours.
TEST(Presets, FloorsMatchEachSystem) {
  const std::vector<std::pair<std::string, float>> floors = {{"torch", kSmallestScale},
                                                             {"precision-rl", kSmallestScale},
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
                                                             {"verl-megatron", 1.0f},
                                                             {"fairseq2", 1e-4f},
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

TEST(Presets, CeilingsMatchEachSystem) {
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

TEST(Presets, DefaultsMatchEachSystem) {
  struct Default {
    const char* name;
    float init;
    int32_t interval;
    int32_t hysteresis;
  };
  for (const Default& expected : {Default{"torch", 65536, 2000, 1},
                                  {"precision-rl", 65536, 400, 1},
                                  {"apex", 65536, 2000, 1},
                                  {"keras", 32768, 2000, 1},
                                  {"tf-keras", 32768, 2000, 1},
                                  {"mxnet", 65536, 2000, 1},
                                  {"megatron", 4294967296.0f, 1000, 2},
                                  {"verl-megatron", 32768, 1000, 2},
                                  {"deepspeed", 65536, 1000, 2},
                                  {"fairseq", 128, 16384, 1},
                                  {"fairseq2", 65536, 2000, 1},
                                  {"icefall", 1, 2000, 1},
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

TEST(Presets, MindSporeRaisesTheAlarmAfterAThousandConsecutiveSkips) {
  DynamicScale far = preset("mindspore").dynamic();
  ScaleNumbers state = initial_numbers(far);
  // Start far above the floor, which raises another alarm.
  state.scale = state.dynamic.pending = kLargestScale;
  far.backoff_factor = 0.99;
  for (int i = 1; i <= 1001; ++i) {
    EXPECT_EQ(advance(far, true, &state), i > 1000 ? Alarm::kSkipsInRow : Alarm::kNone) << i;
  }
}

TEST(Presets, UnknownNameIsRejectedWithTheListOfPresets) {
  expect_error(ErrorCode::kInvalidArgument, "megatron", [] { preset("pytorch"); });
  for (const PresetInfo& info : presets()) EXPECT_NO_THROW(validate(preset(info.name)));
}

}  // namespace
}  // namespace headroom
