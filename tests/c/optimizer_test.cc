// Optimizers through C: fused ones, ones made of callbacks, and accumulators.
#include <headroom/headroom.h>
#include <pthread.h>

#include <cstring>
#include <limits>
#include <stdexcept>

#include "tests/c/support.h"

namespace headroom {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Optimizers, StepsAndStateMatchCppBitwise) {
  std::vector<f16> c_weight(100, f16(1.0f)), c_grad(100, f16(0.25f)), weight = c_weight;
  std::vector<f16> grad = c_grad;
  const hr_parameter parameter = {"w", hr_cpu_tensor(c_weight.data(), HR_F16, 100),
                                  hr_cpu_tensor(c_grad.data(), HR_F16, 100)};
  hr_fused_options options;
  ASSERT_OK(hr_fused_options_init(&options, sizeof(options), HR_ADAMW));
  EXPECT_EQ(options.weight_decay, AdamWOptions{}.weight_decay);
  options.lr = 0.1;
  hr_optimizer* optimizer = nullptr;
  hr_scaler* c_scaler = nullptr;
  ASSERT_OK(hr_fused_create(HR_ADAMW, &parameter, 1, &options, nullptr, &optimizer));
  ASSERT_OK(hr_scaler_create(nullptr, nullptr, &c_scaler));
  AdamW adamw({{"w", view(weight), view(grad)}}, {.lr = 0.1});
  GradScaler scaler;
  for (int i = 0; i < 5; ++i) {
    float scaled = 0.0f;
    ASSERT_OK(hr_scaler_scale(c_scaler, 1.0f, &scaled));
    ASSERT_OK(hr_scaler_step(c_scaler, optimizer, nullptr, nullptr));
    ASSERT_OK(hr_scaler_update(c_scaler));
    scaler.scale(1.0f);
    scaler.step(adamw);
    scaler.update();
  }
  EXPECT_EQ(std::memcmp(weight.data(), c_weight.data(), 200), 0);
  EXPECT_LT(static_cast<float>(weight[0]), 0.9f);

  // The state can be loaded into another optimizer.
  auto state = sized<hr_optimizer_state>();
  ASSERT_OK(hr_optimizer_get_state(optimizer, &state));
  EXPECT_EQ(state.step_count, 1u);
  EXPECT_EQ(state.steps[0], 5);
  ASSERT_EQ(state.tensor_count, adamw.state().tensors.size());
  EXPECT_STREQ(state.tensors[0].name, adamw.state().tensors[0].name.c_str());
  std::vector<f16> other_weight(100), other_grad(100);
  const hr_parameter other = {"w", hr_cpu_tensor(other_weight.data(), HR_F16, 100),
                              hr_cpu_tensor(other_grad.data(), HR_F16, 100)};
  hr_optimizer* loaded = nullptr;
  ASSERT_OK(hr_fused_create(HR_ADAMW, &other, 1, &options, nullptr, &loaded));
  EXPECT_OK(hr_optimizer_load_state(loaded, &state));
  EXPECT_EQ(std::memcmp(other_weight.data(), c_weight.data(), 200), 0);
  hr_optimizer_state broken = state;
  broken.tensor_count -= 1;
  EXPECT_EQ(hr_optimizer_load_state(loaded, &broken), HR_ERROR_BAD_STATE);
  broken = state;
  broken.steps = nullptr;
  EXPECT_EQ(hr_optimizer_load_state(loaded, &broken), HR_ERROR_NULL);
  broken.step_count = SIZE_MAX;
  EXPECT_EQ(hr_optimizer_load_state(loaded, &broken), HR_ERROR_OUT_OF_MEMORY);
  EXPECT_OK(hr_optimizer_destroy(loaded));
  EXPECT_OK(hr_optimizer_destroy(optimizer));
  EXPECT_OK(hr_scaler_destroy(c_scaler));
}

TEST(Optimizers, AdamGroupsUseTheirOwnOptions) {
  std::vector<float> weight(8, 1.0f), grad(8, 1.0f);
  const hr_parameter first = {"a", hr_cpu_tensor(weight.data(), HR_F32, 4),
                              hr_cpu_tensor(grad.data(), HR_F32, 4)};
  const hr_parameter second = {"b", hr_cpu_tensor(weight.data() + 4, HR_F32, 4),
                               hr_cpu_tensor(grad.data() + 4, HR_F32, 4)};
  hr_fused_options options;
  ASSERT_OK(hr_fused_options_init(&options, sizeof(options), HR_ADAMW));
  options.lr = 0.25;
  options.weight_decay = 0.0;
  hr_optimizer* optimizer = nullptr;
  ASSERT_OK(hr_fused_create(HR_ADAMW, &first, 1, &options, nullptr, &optimizer));
  options.lr = 0.5;
  size_t group = 0;
  ASSERT_OK(hr_fused_add_group(optimizer, &second, 1, &options, &group));
  EXPECT_EQ(group, 1u);
  hr_scaler* scaler = nullptr;
  ASSERT_OK(hr_scaler_create(nullptr, nullptr, &scaler));
  float scale = 0.0f;
  ASSERT_OK(hr_scaler_scale(scaler, 1.0f, &scale));
  std::fill(grad.begin(), grad.end(), scale);
  ASSERT_OK(hr_scaler_step(scaler, optimizer, nullptr, nullptr));
  EXPECT_NEAR(weight[0], 0.75f, 1e-5f);
  EXPECT_NEAR(weight[7], 0.5f, 1e-5f);
  EXPECT_OK(hr_optimizer_destroy(optimizer));
  EXPECT_OK(hr_scaler_destroy(scaler));
}

TEST(Optimizers, SgdGroupsAndOptionsCanBeReadAndSet) {
  Training training;
  std::vector<float> weight(4), grad(4);
  hr_parameter more = {nullptr, hr_cpu_tensor(weight.data(), HR_F32, 4),
                       hr_cpu_tensor(grad.data(), HR_F32, 4)};
  hr_fused_options options;
  ASSERT_OK(hr_fused_options_init(&options, sizeof(options), HR_SGD));
  options.lr = 0.5;
  size_t group = 0;
  EXPECT_OK(hr_fused_add_group(training.optimizer, &more, 1, &options, &group));
  EXPECT_EQ(group, 1u);
  EXPECT_EQ(hr_fused_add_group(training.optimizer, &more, 1, &options, &group),
            HR_ERROR_INVALID_ARGUMENT);  // the same memory twice
  EXPECT_OK(hr_optimizer_set_lr(training.optimizer, 0.25));
  EXPECT_OK(hr_fused_get_options(training.optimizer, 1, &options));
  EXPECT_EQ(options.lr, 0.25);
  options.lr = -1.0;
  EXPECT_EQ(hr_fused_set_options(training.optimizer, 1, &options), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(hr_fused_get_options(training.optimizer, 2, &options), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(hr_fused_set_options(training.optimizer, 9, &options), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(hr_fused_options_init(&options, sizeof(options), 4), HR_ERROR_INVALID_ARGUMENT);
  hr_optimizer* none = nullptr;
  EXPECT_EQ(hr_fused_create(-1, &more, 1, nullptr, nullptr, &none), HR_ERROR_INVALID_ARGUMENT);

  EXPECT_OK(hr_optimizer_set_grad(training.optimizer, 1, nullptr));
  auto report = sized<hr_report>();
  ASSERT_OK(training.step(1.0f, &report));
  EXPECT_EQ(report.stats.count, 10) << "parameter 1 has no gradient any more";
  EXPECT_EQ(hr_optimizer_set_grad(training.optimizer, 7, nullptr), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_OK(hr_optimizer_refresh_masters(training.optimizer));
}

TEST(Optimizers, PrecisionOptionsAreApplied) {
  std::vector<bf16> weight(10), grad(10);
  const hr_parameter parameter = {"w", hr_cpu_tensor(weight.data(), HR_BF16, 10),
                                  hr_cpu_tensor(grad.data(), HR_BF16, 10)};
  hr_precision precision;
  ASSERT_OK(hr_precision_init(&precision, sizeof(precision)));
  EXPECT_EQ(precision.master_weights, 1);
  precision.master_weights = 0;
  hr_optimizer* optimizer = nullptr;
  ASSERT_OK(hr_fused_create(HR_ADAM, &parameter, 1, nullptr, &precision, &optimizer));
  auto state = sized<hr_optimizer_state>();
  EXPECT_OK(hr_optimizer_get_state(optimizer, &state));
  EXPECT_EQ(state.tensor_count, 2u);  // two moments and no master
  hr_fused_options adam;
  ASSERT_OK(hr_fused_options_init(&adam, sizeof(adam), HR_ADAM));
  EXPECT_OK(hr_fused_set_options(optimizer, 0, &adam));
  EXPECT_OK(hr_optimizer_destroy(optimizer));
}

TEST(Optimizers, LionAndCompactStateAreCreatedAndSavedInFp32) {
  std::vector<bf16> weight(100, bf16(1.0f)), grad(100, bf16(1.0f));
  const hr_parameter parameter = {"w", hr_cpu_tensor(weight.data(), HR_BF16, 100),
                                  hr_cpu_tensor(grad.data(), HR_BF16, 100)};
  hr_precision precision;
  ASSERT_OK(hr_precision_init(&precision, sizeof(precision)));
  precision.state = HR_STATE_BYTE;
  hr_optimizer* optimizer = nullptr;
  ASSERT_OK(hr_fused_create(HR_LION, &parameter, 1, nullptr, &precision, &optimizer));
  hr_fused_options options;
  ASSERT_OK(hr_fused_options_init(&options, sizeof(options), HR_LION));
  EXPECT_EQ(options.lr, 1e-4);
  EXPECT_EQ(options.beta2, 0.99);
  options.lr = 0.25;
  EXPECT_OK(hr_fused_set_options(optimizer, 0, &options));
  hr_scaler* scaler = nullptr;
  ASSERT_OK(hr_scaler_create("static:scale=1", nullptr, &scaler));
  float scale = 0.0f;
  ASSERT_OK(hr_scaler_scale(scaler, 1.0f, &scale));
  ASSERT_OK(hr_scaler_step(scaler, optimizer, nullptr, nullptr));
  EXPECT_EQ(static_cast<float>(weight[99]), 0.75f);
  auto state = sized<hr_optimizer_state>();
  EXPECT_OK(hr_optimizer_get_state(optimizer, &state));
  ASSERT_EQ(state.tensor_count, 2u);
  EXPECT_EQ(state.tensors[0].tensor.dtype, HR_F32);
  EXPECT_EQ(static_cast<const float*>(state.tensors[0].tensor.data)[99], 0.75f);
  EXPECT_OK(hr_optimizer_load_state(optimizer, &state));
  precision.state = 3;
  hr_optimizer* none = nullptr;
  EXPECT_EQ(hr_fused_create(HR_LION, &parameter, 1, nullptr, &precision, &none),
            HR_ERROR_INVALID_ARGUMENT);
  precision.size = 24;  // of a program that was compiled before there was a choice
  EXPECT_OK(hr_fused_create(HR_ADAMW, &parameter, 1, nullptr, &precision, &none));
  EXPECT_OK(hr_optimizer_destroy(none));
  EXPECT_OK(hr_optimizer_destroy(optimizer));
  EXPECT_OK(hr_scaler_destroy(scaler));
}

// The user data of the callbacks: what they received and how they should behave.
struct CallbackData {
  float multiplier = 0.0f;
  std::string culprit;
  int32_t result = 0;
  bool throws = false;
  bool exits = false;
  hr_optimizer* optimizer = nullptr;
  hr_scaler* scaler = nullptr;
  std::vector<hr_status> nested_calls;  // results of calls from inside apply
};

int32_t apply_callback(float multiplier, int32_t, void* user) {
  CallbackData& data = *static_cast<CallbackData*>(user);
  data.multiplier = multiplier;
  if (data.throws) throw std::runtime_error("out of a callback");
  if (data.exits) pthread_exit(nullptr);
  float scale = 0.0f;
  data.nested_calls = {hr_scaler_scale(data.scaler, 1.0f, &scale),
                       hr_scaler_step(data.scaler, data.optimizer, nullptr, nullptr),
                       hr_optimizer_zero_grad(data.optimizer), hr_optimizer_destroy(data.optimizer),
                       hr_scaler_destroy(data.scaler)};
  return data.result;
}

void skipped_callback(const char* culprit, void* user) {
  CallbackData& data = *static_cast<CallbackData*>(user);
  data.culprit = culprit;
  if (data.throws) throw 1;
  if (data.exits) pthread_exit(nullptr);
}

#ifdef __GLIBC__
// Calls function(argument) in a new thread. True if the thread ended through pthread_exit(nullptr)
// instead of returning.
template <typename Argument>
bool exits_in_thread(void (*function)(Argument*), Argument* argument) {
  struct Call {
    void (*function)(Argument*);
    Argument* argument;
  } call = {function, argument};
  pthread_t thread;
  const auto run = [](void* opaque) -> void* {
    const Call& it = *static_cast<Call*>(opaque);
    it.function(it.argument);
    return opaque;
  };
  EXPECT_EQ(pthread_create(&thread, nullptr, run, &call), 0);
  void* result = &call;
  EXPECT_EQ(pthread_join(thread, &result), 0);
  return result == nullptr;
}
#endif

struct UserOptimizer : testing::Test {
  UserOptimizer() {
    auto callbacks = sized<hr_optimizer_callbacks>();
    callbacks.apply = apply_callback;
    callbacks.skipped = skipped_callback;
    callbacks.user = &data;
    EXPECT_OK(hr_optimizer_destroy(training.optimizer));
    EXPECT_OK(hr_optimizer_create(&training.parameter, 1, &callbacks, &training.optimizer));
    data.optimizer = training.optimizer;
    data.scaler = training.scaler;
  }
  Training training;
  CallbackData data;
};

TEST_F(UserOptimizer, CallbacksReceiveMultiplierAndCulprit) {
  EXPECT_OK(training.step(1.0f));
  EXPECT_EQ(data.multiplier, 1.0f / 65536.0f);
  EXPECT_OK(hr_scaler_update(training.scaler));
  EXPECT_OK(training.step(kInf));
  EXPECT_EQ(data.culprit, "w: 10 inf, 0 nan");
}

TEST_F(UserOptimizer, CallbacksCannotUseTheCallingHandles) {
  EXPECT_OK(training.step(1.0f));
  EXPECT_EQ(data.nested_calls, std::vector<hr_status>(5, HR_ERROR_WRONG_ORDER));
  EXPECT_OK(hr_scaler_update(training.scaler));  // nothing was destroyed
}

TEST_F(UserOptimizer, FailedApplyFailsTheStepWithoutCountingIt) {
  data.result = -3;
  EXPECT_EQ(training.step(1.0f), HR_ERROR_CALLBACK);
  EXPECT_TRUE(last_error_has("apply callback returned -3"));
  data.result = 0;
  auto report = sized<hr_report>();
  EXPECT_OK(hr_scaler_step(training.scaler, training.optimizer, nullptr, &report));
  EXPECT_EQ(report.steps, 1);
}

TEST_F(UserOptimizer, CallbackExceptionsReturnAStatus) {
  data.throws = true;
  EXPECT_EQ(training.step(1.0f), HR_ERROR_CALLBACK);
  EXPECT_EQ(training.step(kInf), HR_ERROR_CALLBACK);
  data.throws = false;
  EXPECT_OK(training.step(1.0f));
  EXPECT_OK(hr_scaler_update(training.scaler));
}

#ifdef __GLIBC__
TEST_F(UserOptimizer, ThreadExitInACallbackReleasesTheHandles) {
  const auto step = [](Training* it) { it->step(1.0f); };
  const auto skip = [](Training* it) { it->step(kInf); };
  data.exits = true;
  EXPECT_TRUE(exits_in_thread<Training>(step, &training));
  EXPECT_TRUE(exits_in_thread<Training>(skip, &training));
  data.exits = false;
  auto report = sized<hr_report>();
  EXPECT_OK(training.step(1.0f, &report));
  EXPECT_EQ(report.steps, 1) << "interrupted steps are not counted, as after HR_ERROR_CALLBACK";
  EXPECT_OK(hr_scaler_update(training.scaler));
  EXPECT_OK(hr_optimizer_zero_grad(training.optimizer));
}

TEST(Alarms, ThreadExitInTheCallbackReleasesTheScaler) {
  hr_scaler_options options;
  ASSERT_OK(hr_scaler_options_init(&options, sizeof(options)));
  options.on_alarm = [](const hr_alarm*, void*) { pthread_exit(nullptr); };
  Training training("dynamic:init_scale=1", &options);
  ASSERT_OK(training.step(kInf));
  EXPECT_TRUE(
      exits_in_thread<Training>([](Training* it) { hr_scaler_update(it->scaler); }, &training));
  EXPECT_OK(training.step(1.0f));  // the update was complete
}
#endif

TEST_F(UserOptimizer, HasNoStateOrLearningRate) {
  auto state = sized<hr_optimizer_state>();
  EXPECT_EQ(hr_optimizer_get_state(training.optimizer, &state), HR_ERROR_UNSUPPORTED);
  EXPECT_EQ(hr_optimizer_set_lr(training.optimizer, 0.1), HR_ERROR_UNSUPPORTED);
  auto options = sized<hr_fused_options>();
  EXPECT_EQ(hr_fused_get_options(training.optimizer, 0, &options), HR_ERROR_UNSUPPORTED);
  hr_parameter parameter = {};
  EXPECT_EQ(hr_accumulator_summed(training.optimizer, 0, &parameter), HR_ERROR_UNSUPPORTED);
}

TEST(Alarms, CallbackExceptionReturnsAStatus) {
  hr_scaler_options options;
  ASSERT_OK(hr_scaler_options_init(&options, sizeof(options)));
  options.on_alarm = [](const hr_alarm*, void*) { throw 1; };
  Training training("dynamic:init_scale=1", &options);
  ASSERT_OK(training.step(kInf));
  EXPECT_EQ(hr_scaler_update(training.scaler), HR_ERROR_CALLBACK);
  EXPECT_OK(training.step(1.0f));  // the update was complete
}

TEST(Accumulators, SumMicroBatches) {
  Training training;
  hr_optimizer* sums = nullptr;
  ASSERT_OK(hr_optimizer_destroy(training.optimizer));
  ASSERT_OK(hr_accumulator_create(&training.parameter, 1, &sums));
  hr_parameter summed = {};
  ASSERT_OK(hr_accumulator_summed(sums, 0, &summed));
  EXPECT_EQ(hr_accumulator_summed(sums, 1, &summed), HR_ERROR_INVALID_ARGUMENT);
  hr_fused_options sgd;
  ASSERT_OK(hr_fused_options_init(&sgd, sizeof(sgd), HR_SGD));
  sgd.lr = 0.125;
  ASSERT_OK(hr_fused_create(HR_SGD, &summed, 1, &sgd, nullptr, &training.optimizer));
  EXPECT_EQ(hr_accumulator_step(sums, training.optimizer, nullptr, nullptr), HR_ERROR_WRONG_ORDER);
  for (int micro = 0; micro < 2; ++micro) {
    float scale = 0.0f;
    ASSERT_OK(hr_scaler_scale(training.scaler, 1.0f, &scale));
    for (float& g : training.grad) g = scale;
    ASSERT_OK(hr_scaler_step(training.scaler, sums, nullptr, nullptr));
    ASSERT_OK(hr_scaler_update(training.scaler));
  }
  auto report = sized<hr_report>();
  EXPECT_EQ(hr_accumulator_step(sums, sums, nullptr, nullptr), HR_ERROR_UNSUPPORTED);
  EXPECT_OK(hr_accumulator_step(sums, training.optimizer, nullptr, &report));
  EXPECT_EQ(report.applied, 1);
  EXPECT_EQ(training.weight[0], 0.75f);
  EXPECT_OK(hr_optimizer_destroy(training.optimizer));
  EXPECT_OK(hr_optimizer_destroy(sums));
}

}  // namespace
}  // namespace headroom
