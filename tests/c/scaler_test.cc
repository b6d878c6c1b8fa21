// The scaler, measurement and policies through C.
#include <dlpack/dlpack.h>
#include <headroom/headroom.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/c/support.h"

extern "C" hr_status step_from_c(hr_report* report);

namespace headroom {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Scaler, StepsFromC) {
  auto report = sized<hr_report>();
  EXPECT_OK(step_from_c(&report));
  EXPECT_EQ(report.applied, 1);
  EXPECT_EQ(report.scale, 65536.0f);
  EXPECT_EQ(report.grad_norm, 0.5);
  EXPECT_EQ(report.steps, 1);
}

TEST(Scaler, SkippedStepReportsTheCulprit) {
  Training training;
  auto report = sized<hr_report>();
  EXPECT_OK(training.step(kInf, &report));
  EXPECT_EQ(report.applied, 0);
  EXPECT_EQ(report.skip, HR_SKIP_NOT_FINITE);
  EXPECT_EQ(report.stats.inf_count, 10);
  EXPECT_STREQ(report.culprit_text, "w: 10 inf, 0 nan");
  EXPECT_EQ(text_of(hr_report_text, &report), "skipped at scale 65536: w: 10 inf, 0 nan");
  EXPECT_EQ(training.weight[0], 1.0f);
  EXPECT_OK(hr_scaler_update(training.scaler));
  float scale = 0.0f;
  EXPECT_OK(hr_scaler_get_scale(training.scaler, &scale));
  EXPECT_EQ(scale, 32768.0f);
  auto state = sized<hr_scale_state>();
  EXPECT_OK(hr_scaler_get_state(training.scaler, &state));
  EXPECT_EQ(state.skipped, 1);
  auto second = sized<hr_report>();
  EXPECT_OK(hr_scaler_report(training.scaler, training.optimizer, &second));
  EXPECT_EQ(std::memcmp(&second, &report, sizeof(report)), 0);
  EXPECT_OK(hr_scaler_try_report(training.scaler, nullptr, &second));
  EXPECT_EQ(second.pending, 0);
}

TEST(Scaler, TextOfASkipByNormGivesTheNorm) {
  Training training;
  float scale = 0.0f;
  ASSERT_OK(hr_scaler_scale(training.scaler, 1.0f, &scale));
  for (float& g : training.grad) g = 0.0f;
  training.grad[0] = 2.0f * scale;
  hr_step_options options;
  ASSERT_OK(hr_step_options_init(&options, sizeof(options)));
  options.skip_above_norm = 1.0f;
  auto report = sized<hr_report>();
  EXPECT_OK(hr_scaler_step(training.scaler, training.optimizer, &options, &report));
  EXPECT_EQ(report.skip, HR_SKIP_NORM_TOO_LARGE);
  EXPECT_EQ(text_of(hr_report_text, &report),
            "skipped at scale 65536: norm 2 is above skip_above_norm");
  report.skip = 4;
  EXPECT_EQ(hr_report_text(&report, nullptr, 0, nullptr), HR_ERROR_INVALID_ARGUMENT);
}

TEST(Scaler, LongNamesAreTruncatedAtACharacterBoundary) {
  Training training;
  std::string name;
  for (int i = 0; i < 200; ++i) name += "\xC3\xA4";  // 400 bytes of a-umlaut
  training.parameter.name = name.c_str();
  EXPECT_OK(hr_optimizer_rebind(training.optimizer, &training.parameter, 1));
  auto report = sized<hr_report>();
  EXPECT_OK(training.step(kInf, &report));
  EXPECT_EQ(std::string(report.culprit_text), name.substr(0, 254));
}

TEST(Scaler, WrongCallOrderReturnsAStatus) {
  Training training;
  EXPECT_EQ(hr_scaler_update(training.scaler), HR_ERROR_WRONG_ORDER);
  EXPECT_EQ(hr_scaler_step(training.scaler, training.optimizer, nullptr, nullptr),
            HR_ERROR_WRONG_ORDER);
  auto report = sized<hr_report>();
  EXPECT_EQ(hr_scaler_report(training.scaler, nullptr, &report), HR_ERROR_WRONG_ORDER);
  EXPECT_OK(hr_scaler_try_report(training.scaler, nullptr, &report));
  EXPECT_EQ(report.pending, 1);
  EXPECT_EQ(text_of(hr_report_text, &report),
            "pending: not known yet; call report() or try_report()");
  EXPECT_OK(training.step(1.0f));
  EXPECT_EQ(hr_scaler_step(training.scaler, training.optimizer, nullptr, nullptr),
            HR_ERROR_WRONG_ORDER);
  EXPECT_EQ(hr_scaler_unscale(training.scaler, training.optimizer, nullptr), HR_ERROR_WRONG_ORDER);
}

TEST(Scaler, OverflowErrorAlsoFillsTheReport) {
  Training training("static:scale=1024,on_overflow=throw");
  auto report = sized<hr_report>();
  EXPECT_EQ(training.step(kInf, &report), HR_ERROR_OVERFLOW);
  EXPECT_EQ(report.skip, HR_SKIP_NOT_FINITE);
  EXPECT_STREQ(report.culprit_text, "w: 10 inf, 0 nan");
}

TEST(Scaler, RetryReportsWhetherToRepeatTheBatch) {
  Training training("headroom-retry");
  int32_t retry = -1;
  EXPECT_OK(training.step(kInf));
  EXPECT_OK(hr_scaler_update(training.scaler));
  EXPECT_OK(hr_scaler_retry(training.scaler, &retry));
  EXPECT_EQ(retry, 1);
  EXPECT_OK(training.step(1.0f));
  EXPECT_OK(hr_scaler_update(training.scaler));
  EXPECT_OK(hr_scaler_retry(training.scaler, &retry));
  EXPECT_EQ(retry, 0);
  EXPECT_EQ(hr_scaler_retry(training.scaler, nullptr), HR_ERROR_NULL);
}

TEST(Scaler, UnscalesClipsAndClears) {
  Training training;
  float scale = 0.0f;
  ASSERT_OK(hr_scaler_scale(training.scaler, 1.0f, &scale));
  for (float& g : training.grad) g = 2.0f * scale;
  hr_stats result = {};
  EXPECT_OK(hr_scaler_unscale(training.scaler, training.optimizer, &result));
  EXPECT_EQ(training.grad[3], 2.0f);
  EXPECT_EQ(result.inf_count, 0);
  EXPECT_EQ(result.count, 10);
  hr_step_options options;
  ASSERT_OK(hr_step_options_init(&options, sizeof(options)));
  options.max_norm = 1.0f;
  options.clear_grads = HR_CLEAR_ALWAYS;
  auto report = sized<hr_report>();
  EXPECT_OK(hr_scaler_step(training.scaler, training.optimizer, &options, &report));
  EXPECT_LT(report.clip_factor, 0.2);
  EXPECT_EQ(training.grad[3], 0.0f);
  options.clear_grads = 7;
  EXPECT_EQ(hr_scaler_step(training.scaler, training.optimizer, &options, &report),
            HR_ERROR_INVALID_ARGUMENT);
}

TEST(Scaler, ScalesTensors) {
  Training training;
  f16 loss(0.5f);
  float scaled = 0.0f;
  const hr_tensor from = hr_cpu_tensor(&loss, HR_F16, 1), to = hr_cpu_tensor(&scaled, HR_F32, 1);
  EXPECT_OK(hr_scaler_scale_tensor(training.scaler, &from, &to));
  EXPECT_EQ(scaled, 32768.0f);
  EXPECT_EQ(hr_scaler_scale_tensor(training.scaler, &to, &from), HR_ERROR_MISMATCH);
  EXPECT_EQ(hr_scaler_set_scale(training.scaler, 2.0f),
            HR_ERROR_WRONG_ORDER);  // a scaled loss is pending
  EXPECT_OK(hr_scaler_discard(training.scaler));
  EXPECT_OK(hr_scaler_set_scale(training.scaler, 2.0f));
  EXPECT_EQ(hr_scaler_set_scale(training.scaler, 0.0f), HR_ERROR_INVALID_ARGUMENT);
}

TEST(Scaler, NormAboveTheLimitSkipsTheStepWithoutBackoff) {
  Training training;
  hr_step_options options;
  ASSERT_OK(hr_step_options_init(&options, sizeof(options)));
  options.skip_above_norm = 1.0f;
  float scale = 0.0f;
  ASSERT_OK(hr_scaler_scale(training.scaler, 1.0f, &scale));
  for (float& grad : training.grad) grad = 2.0f * scale;
  auto report = sized<hr_report>();
  EXPECT_OK(hr_scaler_step(training.scaler, training.optimizer, &options, &report));
  EXPECT_EQ(report.skip, HR_SKIP_NORM_TOO_LARGE);
  EXPECT_OK(hr_scaler_update(training.scaler));
  EXPECT_OK(hr_scaler_get_scale(training.scaler, &scale));
  EXPECT_EQ(scale, 65536.0f) << "a norm above the limit is not an overflow";
}

TEST(Scaler, SavesAndLoadsJson) {
  Training training;
  ASSERT_OK(training.step(kInf));
  ASSERT_OK(hr_scaler_update(training.scaler));
  const std::string json = text_of(hr_scaler_save, training.scaler);
  Training other;
  EXPECT_OK(hr_scaler_load(other.scaler, json.c_str()));
  EXPECT_EQ(text_of(hr_scaler_save, other.scaler), json);
  EXPECT_EQ(hr_scaler_load(other.scaler, "{}"), HR_ERROR_BAD_STATE);
  EXPECT_EQ(hr_scaler_load(other.scaler, "\xFF\xFE"), HR_ERROR_BAD_STATE);

  char small[8] = "before";
  size_t needed = 0;
  EXPECT_EQ(hr_scaler_save(training.scaler, small, sizeof(small), &needed),
            HR_ERROR_BUFFER_TOO_SMALL);
  EXPECT_EQ(needed, json.size() + 1);
  EXPECT_STREQ(small, "before");
  EXPECT_EQ(hr_scaler_save(training.scaler, nullptr, 10, &needed), HR_ERROR_NULL);
}

TEST(Scaler, AlarmsCallTheCallbackOrReturnAStatus) {
  const char* const policy = "dynamic:init_scale=1";  // starts at the floor
  Training without(policy);
  ASSERT_OK(without.step(kInf));
  EXPECT_EQ(hr_scaler_update(without.scaler), HR_ERROR_SCALE_COLLAPSED);
  EXPECT_TRUE(last_error_has("Scaling cannot help here"));

  hr_scaler_options options;
  ASSERT_OK(hr_scaler_options_init(&options, sizeof(options)));
  std::string culprit;
  options.user = &culprit;
  options.on_alarm = [](const hr_alarm* alarm, void* user) {
    EXPECT_EQ(alarm->alarm, HR_ALARM_AT_FLOOR);
    EXPECT_EQ(alarm->size, sizeof(hr_alarm));
    *static_cast<std::string*>(user) = alarm->culprit;
  };
  Training with(policy, &options);
  ASSERT_OK(with.step(kInf));
  EXPECT_OK(hr_scaler_update(with.scaler));
  EXPECT_EQ(culprit, "w: 10 inf, 0 nan");
}

TEST(Scaler, SettingsCanBeReadAndChanged) {
  hr_scaler_options options;
  ASSERT_OK(hr_scaler_options_init(&options, sizeof(options)));
  options.enabled = 0;
  Training training(nullptr, &options);
  float scaled = 0.0f;
  EXPECT_OK(hr_scaler_scale(training.scaler, 3.0f, &scaled));
  EXPECT_EQ(scaled, 3.0f) << "disabled";
  EXPECT_OK(hr_scaler_set_policy(training.scaler, "torch:growth_interval=5"));
  EXPECT_EQ(hr_scaler_set_policy(training.scaler, "torch:growth_interval=-5"),
            HR_ERROR_INVALID_ARGUMENT);
  const std::string policy = text_of(hr_scaler_get_policy, training.scaler);
  EXPECT_NE(policy.find("growth_interval=5,"), std::string::npos) << policy;
  const float* scale = nullptr;
  EXPECT_EQ(hr_scaler_device_scale(training.scaler, &scale), HR_ERROR_UNSUPPORTED);
  options.device_type = 9;
  hr_scaler* scaler = nullptr;
  EXPECT_EQ(hr_scaler_create(nullptr, &options, &scaler), HR_ERROR_INVALID_ARGUMENT);
  if (!cuda_available()) {
    options.device_type = HR_CUDA;
    EXPECT_EQ(hr_scaler_create(nullptr, &options, &scaler), HR_ERROR_UNSUPPORTED);
    int stream = 0;
    EXPECT_EQ(hr_set_stream(&stream), HR_ERROR_UNSUPPORTED);
  }
  EXPECT_OK(hr_set_stream(nullptr));
}

TEST(Policies, EveryPresetMatchesCpp) {
  size_t count = 0;
  ASSERT_OK(hr_preset_count(&count));
  ASSERT_EQ(count, presets().size());
  for (size_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    const char* summary = nullptr;
    ASSERT_OK(hr_preset_info(i, &name, &summary));
    hr_scaler* scaler = nullptr;
    ASSERT_OK(hr_scaler_create(name, nullptr, &scaler));
    EXPECT_EQ(text_of(hr_scaler_get_policy, scaler), to_string(preset(name)));
    EXPECT_EQ(text_of(hr_scaler_save, scaler), GradScaler(preset(name)).save()) << name;
    EXPECT_OK(hr_scaler_destroy(scaler));
  }
  const char* name = nullptr;
  EXPECT_EQ(hr_preset_info(count, &name, nullptr), HR_ERROR_INVALID_ARGUMENT);
  hr_scaler* none = nullptr;
  EXPECT_EQ(hr_scaler_create("nobody", nullptr, &none), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("megatron"));
  EXPECT_EQ(hr_scaler_create("static:0", nullptr, &none), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
}

TEST(Measure, CountsNonFiniteValuesZerosAndExponents) {
  std::vector<float> values = {1.0f, -4.0f, 0.0f, kInf, std::nanf("")};
  const hr_tensor tensor = hr_cpu_tensor(values.data(), HR_F32, 5);
  hr_stats stats = {};
  auto detail = sized<hr_detail>();
  EXPECT_OK(hr_measure(&tensor, 1, &stats, &detail));
  EXPECT_EQ(stats.count, 5);
  EXPECT_EQ(stats.inf_count, 1);
  EXPECT_EQ(stats.nan_count, 1);
  EXPECT_EQ(stats.amax, 4.0);
  EXPECT_EQ(detail.zeros, 1);
  EXPECT_EQ(detail.histogram[2 - HR_HISTOGRAM_MIN_EXPONENT], 1);
  hr_stats result = {};
  EXPECT_OK(hr_unscale(&tensor, 1, 0.5f, &result));
  EXPECT_EQ(values[1], -2.0f);
  EXPECT_EQ(result.culprit, 0);

  hr_tensor broken = tensor;
  broken.dtype = 256;  // invalid, although its low byte is a valid dtype
  EXPECT_EQ(hr_measure(&broken, 1, &stats, nullptr), HR_ERROR_INVALID_ARGUMENT);
  broken = tensor;
  broken.device_type = -1;
  EXPECT_EQ(hr_measure(&broken, 1, &stats, nullptr), HR_ERROR_INVALID_ARGUMENT);
  broken = tensor;
  broken.read_only = 1;
  EXPECT_EQ(hr_unscale(&broken, 1, 0.5f, nullptr), HR_ERROR_INVALID_ARGUMENT);
}

TEST(Measure, UnscaleRejectsTensorsThatShareMemory) {
  std::vector<float> values(10, 1.0f);
  const hr_tensor tensors[] = {hr_cpu_tensor(values.data(), HR_F32, 6),
                               hr_cpu_tensor(values.data() + 5, HR_F32, 5)};
  EXPECT_EQ(hr_unscale(tensors, 2, 0.5f, nullptr), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("Gradient 0 and gradient 1 share memory")) << hr_last_error();
  EXPECT_EQ(values, std::vector<float>(10, 1.0f));
}

TEST(Tensors, ConvertAndRoundTripThroughDlpack) {
  std::vector<float> values = {1.0f, 70000.0f, 1e-8f};
  std::vector<f16> halves(3);
  const hr_tensor from = hr_cpu_tensor(values.data(), HR_F32, 3);
  const hr_tensor to = hr_cpu_tensor(halves.data(), HR_F16, 3);
  EXPECT_OK(hr_convert(&from, &to));
  EXPECT_EQ(static_cast<float>(halves[1]), kInf);
  EXPECT_EQ(static_cast<float>(halves[2]), 0.0f);

  DLManagedTensor* managed = nullptr;
  ASSERT_OK(hr_to_dlpack(&to, &managed));
  hr_tensor back = {};
  EXPECT_OK(hr_from_dlpack(managed, &back));
  EXPECT_EQ(std::memcmp(&back, &to, sizeof(to)), 0);
  managed->dl_tensor.dtype.code = kDLInt;
  EXPECT_EQ(hr_from_dlpack(managed, &back), HR_ERROR_UNSUPPORTED);
  managed->deleter(managed);
}

TEST(Library, RuntimeSettingsCanBeReadAndChanged) {
  EXPECT_OK(hr_set_num_threads(3));
  int32_t threads = 0;
  EXPECT_OK(hr_num_threads(&threads));
  EXPECT_EQ(threads, 3);
  EXPECT_OK(hr_set_num_threads(0));
  const std::string target = text_of(hr_simd_target);
  EXPECT_EQ(target, simd_target());
  int32_t cuda = -1;
  EXPECT_OK(hr_cuda_available(&cuda));
  EXPECT_EQ(cuda, cuda_available());
}

}  // namespace
}  // namespace headroom
