// RangeTable against an oracle that converts every element to FP16.
#include <headroom/ranges.h>

#include "tests/support.h"

namespace headroom {
namespace {

// The statistics of numbers by converting each of them.
template <typename T>
RangeStats expected(const std::vector<T>& values) {
  RangeStats stats;
  stats.count = static_cast<int64_t>(values.size());
  for (const T value : values) {
    const double x = to_double(value);
    if (std::isnan(x)) {
      ++stats.nan;
      continue;
    }
    if (std::isinf(x)) {
      ++(x > 0 ? stats.positive_inf : stats.negative_inf);
      continue;
    }
    const double size = std::fabs(x);
    stats.amax = std::max(stats.amax, size);
    stats.zeros += size == 0.0;
    stats.flushed += size > 0.0 && size <= 0x1p-25;
    stats.subnormal += size > 0x1p-25 && size < 0x1p-14;
    stats.overflow += size >= 65520.0;
  }
  return stats;
}

void expect_same(const RangeStats& got, const RangeStats& want) {
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.zeros, want.zeros);
  EXPECT_EQ(got.flushed, want.flushed);
  EXPECT_EQ(got.subnormal, want.subnormal);
  EXPECT_EQ(got.overflow, want.overflow);
  EXPECT_EQ(got.positive_inf, want.positive_inf);
  EXPECT_EQ(got.negative_inf, want.negative_inf);
  EXPECT_EQ(got.nan, want.nan);
  EXPECT_EQ(got.amax, want.amax);
}

template <typename T>
void expect_measured(const std::vector<T>& values) {
  RangeTable table(1);
  table.begin();
  EXPECT_EQ(table.measure(view(values)), 0);
  table.finish();
  expect_same(table.read()[0], expected(values));
}

// Numbers around the limits of FP16 and of the type itself.
template <typename T>
std::vector<T> around_limits(size_t count) {
  std::vector<T> values;
  std::mt19937 random(7);
  for (size_t i = 0; i < count; ++i) {
    const double limits[] = {0x1p-25, 0x1p-14, 65504.0, 65520.0, 0x1p16, 1.0, 0.0, 1e-30};
    const double nudges[] = {1.0, 1.0 + 0x1p-23, 1.0 - 0x1p-24, -1.0, 1.0 + 0x1p-7};
    values.push_back(static_cast<T>(static_cast<float>(limits[random() % std::size(limits)] *
                                                       nudges[random() % std::size(nudges)])));
    if (random() % 500 == 0) values.back() = static_cast<T>(kInf);
    if (random() % 500 == 0) values.back() = static_cast<T>(-kInf);
    if (random() % 500 == 0) values.back() = static_cast<T>(kNan);
  }
  return values;
}

TEST(RangeTable, CountsEvery16BitPattern) {
  expect_measured(all_patterns<f16>());
  expect_measured(all_patterns<bf16>());
}

TEST(RangeTable, CountsElementsAroundTheLimits) {
  for (const size_t count : {0, 1, 7, 4095, 4097, 200000}) {
    expect_measured(around_limits<float>(count));
    expect_measured(around_limits<double>(count));
    expect_measured(around_limits<f16>(count));
    expect_measured(around_limits<bf16>(count));
  }
}

TEST(RangeTable, IsTheSameForAnyNumberOfThreadsAndAlignment) {
  const std::vector<float> values = around_limits<float>(300001);
  std::vector<char> memory(4 * values.size() + 1);
  std::memcpy(memory.data() + 1, values.data(), 4 * values.size());
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    RangeTable table;
    table.begin();
    table.measure(view(static_cast<const void*>(memory.data() + 1), DType::kF32,
                       static_cast<int64_t>(values.size())));
    table.finish();
    expect_same(table.read()[0], expected(values));
  }
  set_num_threads(0);
}

TEST(RangeTable, KeepsTheOrderOfCallsAndStopsWhenFull) {
  std::vector<float> one{1.0f}, two{2.0f};
  RangeTable table(2);
  expect_error(ErrorCode::kWrongOrder, "before finish()", [&] { table.read(); });
  for (int round = 0; round < 2; ++round) {  // begin() makes room again
    table.begin();
    EXPECT_FALSE(table.ready());
    EXPECT_EQ(table.measure(view(two)), 0);
    EXPECT_EQ(table.measure(view(one)), 1);
    EXPECT_EQ(table.measure(view(one)), -1);
    table.finish();
    EXPECT_TRUE(table.ready());
    ASSERT_EQ(table.read().size(), 2u);
    EXPECT_EQ(table.read()[0].amax, 2.0);
  }
}

TEST(RangeTable, RefusesViewsWithoutMemory) {
  RangeTable table;
  expect_error(ErrorCode::kInvalidArgument, "The tensor",
               [&] { table.measure(view(static_cast<const float*>(nullptr), 3)); });
  expect_error(ErrorCode::kInvalidArgument, "rows is 0", [] { RangeTable(0); });
}

}  // namespace
}  // namespace headroom
