// The measure kernels on every 16-bit pattern, every length around the vector widths, every
// position in a vector and every alignment, on every SIMD target.
#include "measure/stats.h"
#include "tests/support.h"

namespace headroom {
namespace {

class MeasureKernels : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(MeasureKernels);

template <typename T>
bool is_nan_pattern(T value) {
  return std::isnan(static_cast<float>(value));
}
template <typename T>
bool is_inf_pattern(T value) {
  return std::isinf(static_cast<float>(value));
}

template <typename T>
void expect_each_pattern_classified() {
  std::vector<T> values(40, T(0.25f));
  for (const T pattern : all_patterns<T>()) {
    values[17] = pattern;
    const GradStats stats = measure({view(values)});
    ASSERT_EQ(stats.inf_count, is_inf_pattern(pattern)) << pattern.bits;
    ASSERT_EQ(stats.nan_count, is_nan_pattern(pattern)) << pattern.bits;
    const double magnitude = std::fabs(to_double(pattern));
    if (stats.finite()) {
      ASSERT_EQ(stats.amax, std::max(0.25, magnitude)) << pattern.bits;
    }
  }
}

TEST_P(MeasureKernels, ClassifiesEveryBitPattern) {
  expect_each_pattern_classified<f16>();
  expect_each_pattern_classified<bf16>();
}

template <typename T>
void expect_all_patterns_measured() {
  const std::vector<T> values = all_patterns<T>();
  int64_t inf = 0, nan = 0;
  long double squares = 0.0L;
  double amax = 0.0;
  for (const T value : values) {
    inf += is_inf_pattern(value);
    nan += is_nan_pattern(value);
    if (is_inf_pattern(value) || is_nan_pattern(value)) continue;
    const double x = to_double(value);
    squares += static_cast<long double>(x) * x;
    amax = std::max(amax, std::fabs(x));
  }
  const GradStats stats = measure({view(values)});
  EXPECT_EQ(stats.inf_count, inf);
  EXPECT_EQ(stats.nan_count, nan);
  EXPECT_EQ(stats.culprit, 0);
  EXPECT_EQ(stats.culprit_inf, inf);
  EXPECT_EQ(stats.amax, amax);
  const double norm = static_cast<double>(std::sqrt(squares));
  EXPECT_NEAR(internal::finite_norm(stats) / norm, 1.0, 1e-6);
  EXPECT_TRUE(std::isnan(stats.norm()));
}

TEST_P(MeasureKernels, MeasuresAllBitPatternsTogether) {
  expect_all_patterns_measured<f16>();
  expect_all_patterns_measured<bf16>();
}

template <typename T>
void expect_lengths_and_positions() {
  const std::vector<T> ordinary = random_values<T>(2200, 3);
  std::vector<int64_t> counts;
  for (int64_t count = 0; count <= 70; ++count) counts.push_back(count);
  for (const int64_t near : {128, 512, 1024, 2048}) {
    for (int64_t count = near - 2; count <= near + 2; ++count) counts.push_back(count);
  }
  for (const int64_t count : counts) {
    std::vector<T> values(ordinary.begin(), ordinary.begin() + count);
    const GradStats clean = measure({view(values)});
    double squares = 0.0;
    for (const T value : values) squares += to_double(value) * to_double(value);
    ASSERT_TRUE(clean.finite()) << count;
    ASSERT_EQ(clean.count, count);
    ASSERT_NEAR(clean.norm(), std::sqrt(squares), 1e-6 * (1.0 + std::sqrt(squares))) << count;
    const int64_t step = count <= 70 ? 1 : 61;
    for (int64_t position = 0; position < count; position += step) {
      const T before = values[static_cast<size_t>(position)];
      values[static_cast<size_t>(position)] = from_float<T>(position % 2 == 0 ? kInf : kNan);
      const GradStats bad = measure({view(values)});
      ASSERT_EQ(bad.inf_count, position % 2 == 0) << count << " " << position;
      ASSERT_EQ(bad.nan_count, position % 2 == 1) << count << " " << position;
      values[static_cast<size_t>(position)] = before;
    }
  }
}

TEST_P(MeasureKernels, FindsNonFiniteElementsAtEveryLengthAndPosition) {
  expect_lengths_and_positions<f16>();
  expect_lengths_and_positions<bf16>();
  expect_lengths_and_positions<float>();
  expect_lengths_and_positions<double>();
}

template <typename T>
void expect_independent_of_alignment() {
  std::vector<T> values = random_values<T>(3000, 4);
  values[1234] = from_float<T>(kNan);
  GradDetail expected_detail, found_detail;
  const GradStats expected = measure({view(values)}, &expected_detail);
  std::vector<T> unscaled = values;
  unscale_({view(unscaled)}, 0.5f);
  std::vector<char> memory(3001 * sizeof(T));
  for (size_t offset = 0; offset < sizeof(T); ++offset) {
    std::memcpy(memory.data() + offset, values.data(), 3000 * sizeof(T));
    const TensorView shifted =
        view(static_cast<void*>(memory.data() + offset), dtype_of<T>(), 3000);
    const GradStats found = measure({shifted}, &found_detail);
    ASSERT_EQ(fingerprint(found), fingerprint(expected)) << offset;
    ASSERT_EQ(found_detail.histogram, expected_detail.histogram) << offset;
    unscale_({shifted}, 0.5f);
    ASSERT_EQ(std::memcmp(memory.data() + offset, unscaled.data(), 3000 * sizeof(T)), 0) << offset;
  }
}

TEST_P(MeasureKernels, ResultsDoNotDependOnAlignment) {
  expect_independent_of_alignment<f16>();
  expect_independent_of_alignment<bf16>();
  expect_independent_of_alignment<float>();
  expect_independent_of_alignment<double>();
}

}  // namespace
}  // namespace headroom
