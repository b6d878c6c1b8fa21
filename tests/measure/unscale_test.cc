// unscale_() on every SIMD target against scalar arithmetic, and the arguments it rejects.
#include "tests/support.h"

namespace headroom {
namespace {

class Unscale : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(Unscale);

constexpr float kInverses[] = {0x1p-16f, 0x1p-1f, 0x1p4f, 0x1p100f, 1.0f / 3.0f, 1.0f};

template <typename T>
void expect_every_pattern_matches_reference(float inverse) {
  std::vector<T> values = all_patterns<T>();
  const std::vector<T> before = values;
  const GradStats result = unscale_({view(values)}, inverse);
  int64_t zeros = 0, infs = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const float wide = static_cast<float>(before[i]);
    const T expected = inverse == 1.0f ? before[i] : T(wide * inverse);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(values[i])));
      continue;
    }
    ASSERT_EQ(values[i].bits, expected.bits) << before[i].bits << " x " << inverse;
    const float after = static_cast<float>(expected);
    zeros += wide != 0.0f && after == 0.0f;
    infs += !std::isinf(wide) && std::isinf(after);
  }
  EXPECT_EQ(result.new_zeros, zeros) << inverse;
  EXPECT_EQ(result.new_inf, infs) << inverse;
  EXPECT_GT(result.nan_count, 0);
  EXPECT_FALSE(result.ok());
}

TEST_P(Unscale, EveryBitPatternMatchesTheScalarReference) {
  for (const float inverse : kInverses) {
    expect_every_pattern_matches_reference<f16>(inverse);
    expect_every_pattern_matches_reference<bf16>(inverse);
  }
}

template <typename T>
void expect_writes_only_given_elements() {
  for (size_t count = 0; count < 70; ++count) {
    std::vector<T> values = random_values<T>(count + 2, 5);
    const std::vector<T> before = values;
    const GradStats result =
        unscale_({view(values.data() + 1, static_cast<int64_t>(count))}, 0.25f);
    EXPECT_TRUE(result.ok());
    for (size_t i = 0; i < values.size(); ++i) {
      const bool inside = i >= 1 && i <= count;
      ASSERT_EQ(to_double(values[i]), to_double(before[i]) * (inside ? 0.25 : 1.0)) << count;
    }
  }
}

TEST_P(Unscale, WritesOnlyTheGivenElementsAtAnyLength) {
  expect_writes_only_given_elements<f16>();
  expect_writes_only_given_elements<bf16>();
  expect_writes_only_given_elements<float>();
  expect_writes_only_given_elements<double>();
}

TEST_P(Unscale, ReturnsStatsOfTheScaledGradients) {
  std::vector<float> values = random_values<float>(5000, 6, 100.0);
  values[4321] = -kInf;
  const GradStats measured = measure({view(values)});
  const GradStats result = unscale_({view(values)}, 0x1p-8f);
  EXPECT_EQ(fingerprint(result), fingerprint(measured));
}

TEST(UnscaleChecks, OverflowFromAScaleBelowOneIsCounted) {
  std::vector<float> values = {1e38f, 2.0f};
  const GradStats result = unscale_({view(values)}, 16.0f);
  EXPECT_EQ(result.new_inf, 1);
  EXPECT_FALSE(result.ok());
}

TEST(UnscaleChecks, RejectsInvalidScalesAndConstMemory) {
  std::vector<float> values = {1.0f};
  for (const float bad : {0.0f, -1.0f, kInf, kNan}) {
    expect_error(ErrorCode::kInvalidArgument, "inverse scale",
                 [&] { unscale_({view(values)}, bad); });
  }
  const std::vector<float> constant = {1.0f};
  expect_error(ErrorCode::kInvalidArgument, "const data",
               [&] { unscale_({view(constant)}, 0.5f); });
  EXPECT_EQ(values[0], 1.0f);
}

TEST(UnscaleChecks, RejectsTensorsThatShareMemory) {
  std::vector<float> values(10, 1.0f), other(5, 1.0f);
  const auto expect_rejected = [&](const std::string& part, const std::vector<TensorView>& grads) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { unscale_(grads, 0.5f); });
    EXPECT_EQ(values, std::vector<float>(10, 1.0f));
    EXPECT_EQ(other, std::vector<float>(5, 1.0f));
  };
  expect_rejected("Gradient 0 and gradient 2 share memory",
                  {view(values), view(other), view(values)});
  expect_rejected("Gradient 0 and gradient 1 share memory",
                  {view(values.data() + 4, 6), view(values.data(), 5)});
  expect_rejected("Gradient 1 and gradient 2 share memory",
                  {view(other), view(values), view(values.data() + 3, 1)});
  unscale_({view(values.data() + 5, 5), view(values.data() + 5, 0), view(values.data(), 5)}, 0.5f);
  EXPECT_EQ(values, std::vector<float>(10, 0.5f)) << "adjacent tensors do not share memory";
}

}  // namespace
}  // namespace headroom
