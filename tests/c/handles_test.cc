// Handles and structs: every mistake of a C caller returns a status and never crashes.
#include <atomic>
#include <thread>

#include "adapters/c/structs.h"
#include "tests/c/support.h"

// A struct that gained a member after its first version.
struct ExtendedStruct {
  size_t size;
  int64_t old;
  int64_t added;
};
namespace headroom::c {
template <>
inline constexpr size_t kFirstSize<ExtendedStruct> = 16;
}  // namespace headroom::c

namespace headroom {
namespace {

TEST(Handles, NullArgumentsReturnAStatus) {
  float value = 0.0f;
  EXPECT_EQ(hr_scaler_scale(nullptr, 1.0f, &value), HR_ERROR_NULL);
  EXPECT_STREQ(hr_last_error(), "hr_scaler_scale: 'scaler' is null; pass a valid pointer.");
  EXPECT_EQ(hr_scaler_destroy(nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_optimizer_destroy(nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_scaler_create(nullptr, nullptr, nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_fused_create(HR_SGD, nullptr, 3, nullptr, nullptr, nullptr), HR_ERROR_NULL);
  hr_optimizer* optimizer = nullptr;
  EXPECT_EQ(hr_fused_create(HR_SGD, nullptr, 3, nullptr, nullptr, &optimizer), HR_ERROR_NULL);
  EXPECT_EQ(optimizer, nullptr);
  EXPECT_EQ(hr_measure(nullptr, 1, nullptr, nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_convert(nullptr, nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_from_dlpack(nullptr, nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_report_text(nullptr, nullptr, 0, nullptr), HR_ERROR_NULL);
  Training training;
  EXPECT_EQ(hr_scaler_scale(training.scaler, 1.0f, nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_scaler_step(training.scaler, nullptr, nullptr, nullptr), HR_ERROR_NULL);
  EXPECT_EQ(hr_scaler_load(training.scaler, nullptr), HR_ERROR_NULL);
  const auto callbacks = sized<hr_optimizer_callbacks>();
  EXPECT_EQ(hr_optimizer_create(&training.parameter, 1, &callbacks, &optimizer), HR_ERROR_NULL);
}

TEST(Handles, UseAfterDestroyReturnsBadHandle) {
  Training training;
  ASSERT_OK(training.step(1.0f));
  ASSERT_OK(hr_optimizer_destroy(training.optimizer));
  EXPECT_EQ(hr_optimizer_destroy(training.optimizer), HR_ERROR_BAD_HANDLE);
  EXPECT_EQ(hr_optimizer_zero_grad(training.optimizer), HR_ERROR_BAD_HANDLE);
  EXPECT_OK(hr_scaler_update(training.scaler));  // does not use the destroyed optimizer
  float scale = 0.0f;
  EXPECT_OK(hr_scaler_scale(training.scaler, 1.0f, &scale));
  EXPECT_EQ(hr_scaler_step(training.scaler, training.optimizer, nullptr, nullptr),
            HR_ERROR_BAD_HANDLE);
  ASSERT_OK(hr_scaler_destroy(training.scaler));
  EXPECT_EQ(hr_scaler_destroy(training.scaler), HR_ERROR_BAD_HANDLE);
  EXPECT_EQ(hr_scaler_update(training.scaler), HR_ERROR_BAD_HANDLE);
}

TEST(Handles, AreNeverReused) {
  hr_scaler* first = nullptr;
  ASSERT_OK(hr_scaler_create(nullptr, nullptr, &first));
  ASSERT_OK(hr_scaler_destroy(first));
  for (int i = 0; i < 1000; ++i) {
    hr_scaler* next = nullptr;
    ASSERT_OK(hr_scaler_create(nullptr, nullptr, &next));
    ASSERT_NE(next, first);
    ASSERT_OK(hr_scaler_destroy(next));
  }
}

TEST(Handles, WrongTypeOrForeignPointerReturnsBadHandle) {
  Training training;
  EXPECT_EQ(hr_scaler_update(reinterpret_cast<hr_scaler*>(training.optimizer)),
            HR_ERROR_BAD_HANDLE);
  EXPECT_EQ(hr_optimizer_zero_grad(reinterpret_cast<hr_optimizer*>(training.scaler)),
            HR_ERROR_BAD_HANDLE);
  int not_a_handle = 0;
  EXPECT_EQ(hr_scaler_update(reinterpret_cast<hr_scaler*>(&not_a_handle)), HR_ERROR_BAD_HANDLE);
  EXPECT_EQ(hr_scaler_update(reinterpret_cast<hr_scaler*>(~uintptr_t{0})), HR_ERROR_BAD_HANDLE);
}

TEST(Handles, ConcurrentUseAndDestroyAreSafe) {
  for (int round = 0; round < 20; ++round) {
    Training training;
    std::atomic<int> unexpected{0}, destroyed{0};
    const auto count = [&](hr_status status) {
      if (status == HR_ERROR_BAD_HANDLE || status == HR_OK) return;
      // The threads do not coordinate their calls, so some are out of order.
      if (status != HR_ERROR_WRONG_ORDER) ++unexpected;
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          float scale = 0.0f;
          count(hr_scaler_scale(training.scaler, 1.0f, &scale));
          count(hr_scaler_step(training.scaler, training.optimizer, nullptr, nullptr));
          count(hr_scaler_update(training.scaler));
        }
      });
      threads.emplace_back([&, t] {
        auto state = sized<hr_optimizer_state>();
        for (int i = 0; i < 50; ++i) {
          count(hr_optimizer_set_grad(training.optimizer, 0, &training.parameter.grad));
          count(hr_optimizer_get_state(training.optimizer, &state));
          count(hr_optimizer_zero_grad(training.optimizer));
          size_t needed = 0;
          count(hr_scaler_save(training.scaler, nullptr, 0, &needed));
        }
        destroyed += hr_optimizer_destroy(training.optimizer) == HR_OK;
        if (t == 1) destroyed += hr_scaler_destroy(training.scaler) == HR_OK;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(unexpected, 0) << hr_last_error();
    EXPECT_EQ(destroyed, 2);
  }
}

TEST(Errors, LastErrorIsPerThread) {
  EXPECT_EQ(hr_scaler_destroy(nullptr), HR_ERROR_NULL);
  std::thread([] {
    EXPECT_STREQ(hr_last_error(), "");
    EXPECT_EQ(hr_set_num_threads(-1), HR_ERROR_INVALID_ARGUMENT);
  }).join();
  EXPECT_TRUE(last_error_has("hr_scaler_destroy"));
  int32_t threads = 0;
  EXPECT_OK(hr_num_threads(&threads));
  EXPECT_TRUE(last_error_has("hr_scaler_destroy"));  // a successful call keeps the last error
}

TEST(Errors, EveryStatusHasAName) {
  for (hr_status status = HR_OK; status <= HR_ERROR_INTERNAL; ++status) {
    if (status == HR_ERROR_RANKS_DIFFER + 1) status = HR_ERROR_NULL;
    EXPECT_STRNE(hr_status_name(status), "unknown") << status;
  }
  EXPECT_STREQ(hr_status_name(HR_ERROR_WRONG_ORDER), "wrong order");
  EXPECT_STREQ(hr_status_name(-1), "unknown");
  EXPECT_STREQ(hr_status_name(99), "unknown");
}

TEST(Errors, LongMessagesAreTruncated) {
  const std::string name(5000, 'n');
  hr_scaler* scaler = nullptr;
  EXPECT_EQ(hr_scaler_create(name.c_str(), nullptr, &scaler), HR_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(hr_last_error()).size(), 1023u);
}

TEST(Errors, InvalidCountsReturnAStatus) {
  Training training;
  hr_optimizer* optimizer = nullptr;
  EXPECT_EQ(hr_fused_create(HR_SGD, &training.parameter, SIZE_MAX, nullptr, nullptr, &optimizer),
            HR_ERROR_OUT_OF_MEMORY);
  hr_stats stats = {};
  hr_tensor tensor = training.parameter.weight;
  EXPECT_EQ(hr_measure(&tensor, SIZE_MAX / 2, &stats, nullptr), HR_ERROR_OUT_OF_MEMORY);
  tensor.count = INT64_MAX;
  EXPECT_EQ(hr_measure(&tensor, 1, &stats, nullptr), HR_ERROR_INVALID_ARGUMENT);
  tensor.count = -1;
  EXPECT_EQ(hr_measure(&tensor, 1, &stats, nullptr), HR_ERROR_INVALID_ARGUMENT);
}

TEST(Versions, UnknownStructSizeIsRejectedWithoutEffect) {
  Training training;
  hr_scaler_options given;
  EXPECT_EQ(hr_scaler_options_init(&given, sizeof(given) + 8), HR_ERROR_VERSION);
  EXPECT_EQ(hr_scaler_options_init(&given, 0), HR_ERROR_VERSION);
  ASSERT_OK(hr_scaler_options_init(&given, sizeof(given)));
  given.size = 4;
  hr_scaler* scaler = nullptr;
  EXPECT_EQ(hr_scaler_create(nullptr, &given, &scaler), HR_ERROR_VERSION);
  EXPECT_TRUE(last_error_has("'options' has size 4"));

  auto report = sized<hr_report>();
  report.size += 8;  // a newer header
  EXPECT_EQ(training.step(1.0f, &report), HR_ERROR_VERSION);
  EXPECT_EQ(training.weight[0], 1.0f);
  report.size = 0;  // not initialised
  EXPECT_EQ(hr_scaler_step(training.scaler, training.optimizer, nullptr, &report),
            HR_ERROR_VERSION);
  hr_precision precision;
  EXPECT_EQ(hr_precision_init(&precision, sizeof(precision) - 1), HR_ERROR_VERSION);
  EXPECT_OK(hr_precision_init(&precision, 24));  // of version 0.1
  auto options = sized<hr_step_options>();
  options.size = 1;
  EXPECT_EQ(hr_scaler_step(training.scaler, training.optimizer, &options, nullptr),
            HR_ERROR_VERSION);
  EXPECT_OK(hr_scaler_step(training.scaler, training.optimizer, nullptr, nullptr));
  hr_stats stats = {};
  auto detail = sized<hr_detail>();
  detail.size -= 8;
  EXPECT_EQ(hr_measure(nullptr, 0, &stats, &detail), HR_ERROR_VERSION);
}

TEST(Versions, OlderStructSizesAreSupported) {
  ExtendedStruct old = {16, 7, -1};
  const ExtendedStruct received = c::read_struct(&old, {sizeof(ExtendedStruct), 1, 2}, "extended");
  EXPECT_EQ(received.old, 7);
  EXPECT_EQ(received.added, 2);  // the default, because the caller's struct has no such member
  c::check_output(&old, "extended");
  c::write_struct({sizeof(ExtendedStruct), 8, 9}, &old);
  EXPECT_EQ(old.size, 16u);
  EXPECT_EQ(old.old, 8);
  EXPECT_EQ(old.added, -1);  // beyond the caller's struct
  for (const size_t size : {size_t{0}, size_t{8}, size_t{32}}) {
    old.size = size;
    EXPECT_THROW(c::check_output(&old, "extended"), c::Failure);
  }
}

TEST(Versions, OnlyTheMatchingHeaderVersionIsAccepted) {
  EXPECT_OK(hr_check_version(HEADROOM_VERSION_MAJOR, HEADROOM_VERSION_MINOR));
  EXPECT_EQ(hr_check_version(HEADROOM_VERSION_MAJOR + 1, 0), HR_ERROR_VERSION);
  EXPECT_EQ(hr_check_version(HEADROOM_VERSION_MAJOR, HEADROOM_VERSION_MINOR + 1), HR_ERROR_VERSION);
  EXPECT_EQ(hr_check_version(-1, -1), HR_ERROR_VERSION);
  EXPECT_STREQ(hr_version(), HEADROOM_VERSION);
}

}  // namespace
}  // namespace headroom
