// The recommended static scale and the sentence that explains it.
#include <gtest/gtest.h>
#include <headroom/inspect.h>
#include <rapidcheck/gtest.h>

#include "tests/inspect/reference.h"

namespace headroom {
namespace {

using Verdict = ScaleAdvice::Verdict;

Magnitudes count_magnitudes(const std::vector<float>& values) {
  Magnitudes magnitudes;
  magnitudes.add(view(values));
  return magnitudes;
}

// 2^low, ..., 2^high.
std::vector<float> powers_of_two(int low, int high) {
  std::vector<float> values;
  for (int power = low; power <= high; ++power) values.push_back(std::ldexp(1.0f, power));
  return values;
}

TEST(Advice, LargestGradientStaysEightTimesBelowOverflow) {
  // 1.0 may become 2^12: 8 x 2^12 = 2^15 still fits, 2^16 does not. Down to 2^-30 all stay nonzero.
  const ScaleAdvice advice = advise(count_magnitudes(powers_of_two(-30, 0)));
  EXPECT_EQ(advice.verdict, Verdict::kScale);
  EXPECT_EQ(advice.scale, 0x1p12f);
  EXPECT_EQ(advice.lowest, 0x1p6f);    // 2^-30 x 2^6 = 2^-24
  EXPECT_EQ(advice.highest, 0x1p15f);  // 2^0 x 2^16 would be inf
  EXPECT_EQ(advice.outcome.flushed, 0);
  EXPECT_NE(advice.reason.find("2^12 is the largest power of two that keeps"), std::string::npos)
      << advice.reason;
  EXPECT_EQ(advise(count_magnitudes(powers_of_two(-30, 0)), {Format::kFP16, 1e-3, 0}).scale,
            0x1p15f);
}

TEST(Advice, EquallyGoodScalesGiveTheirMiddle) {
  // 2^-30 is normal from 2^16 on, and 8 times below overflow up to 2^42.
  const ScaleAdvice advice = advise(count_magnitudes({0x1p-30f, -0x1p-30f}));
  EXPECT_EQ(advice.verdict, Verdict::kScale);
  EXPECT_EQ(advice.scale, 0x1p29f);
  EXPECT_NE(advice.reason.find("middle of 2^16 to 2^42"), std::string::npos) << advice.reason;
}

TEST(Advice, UnneededScalingIsReported) {
  const ScaleAdvice fp16 = advise(count_magnitudes(powers_of_two(-14, 10)));
  EXPECT_EQ(fp16.verdict, Verdict::kUnneeded);
  EXPECT_EQ(fp16.scale, 1.0f);
  EXPECT_EQ(advise(count_magnitudes(powers_of_two(-60, 10)), {Format::kBF16}).verdict,
            Verdict::kUnneeded);
  // One subnormal in 24 is more than 0.1 %, less than 5 %.
  EXPECT_EQ(advise(count_magnitudes(powers_of_two(-15, 8))).verdict, Verdict::kScale);
  EXPECT_EQ(advise(count_magnitudes(powers_of_two(-15, 8)), {Format::kFP16, 0.05}).verdict,
            Verdict::kUnneeded);
}

TEST(Advice, RangeTooWideForEveryScaleIsReported) {
  const ScaleAdvice advice = advise(count_magnitudes(powers_of_two(-60, 10)));
  EXPECT_EQ(advice.verdict, Verdict::kNoneFits);
  EXPECT_EQ(advice.scale, 0x1p2f);  // the safe scale that loses least
  EXPECT_EQ(advice.outcome.flushed, 34);
  EXPECT_EQ(advice.lowest, 0.0f);
  EXPECT_NE(advice.reason.find("No scale fits"), std::string::npos) << advice.reason;
}

TEST(Advice, LargestSafeScaleIsRecommendedIfNoneFits) {
  // From 2^-14 on no 1 is subnormal, so all these scales lose the same number of elements.
  std::vector<float> values(100, 1.0f);
  std::fill_n(values.begin(), 29, 1e-12f);
  const ScaleAdvice advice = advise(count_magnitudes(values));
  EXPECT_EQ(advice.verdict, Verdict::kNoneFits);
  EXPECT_EQ(advice.scale, 0x1p12f);
  EXPECT_EQ(advice.lowest, 0x1p15f);
  EXPECT_NE(
      advice.reason.find("2^12 is the largest power of two with that distance; at that scale 29 % "
                         "become zero"),
      std::string::npos)
      << advice.reason;
}

TEST(Advice, SharesBelowOneAreNotRoundedToAHundredPercent) {
  std::vector<float> values(10000, 1e-12f);
  std::fill_n(values.begin(), 3, 1.0f);
  const ScaleAdvice advice = advise(count_magnitudes(values));
  EXPECT_NE(advice.reason.find("at that scale >99.9 % become zero"), std::string::npos)
      << advice.reason;
}

TEST(Advice, ToleratedShareIsComparedExactly) {
  std::vector<float> values(100, 1.0f);
  std::fill_n(values.begin(), 29, 1e-12f);
  EXPECT_EQ(advise(count_magnitudes(values), {Format::kFP16, 0.29}).verdict, Verdict::kUnneeded);
  EXPECT_EQ(advise(count_magnitudes(values), {Format::kFP16, 0.28}).verdict, Verdict::kNoneFits);
}

TEST(Advice, LargestPossibleScaleCanBeRecommended) {
  for (const std::vector<float>& values :
       {std::vector<float>{0x1p-149f, 0x1p-148f, 0x3p-149f}, std::vector<float>{1e-42f}}) {
    const ScaleAdvice advice = advise(count_magnitudes(values));
    EXPECT_EQ(advice.verdict, Verdict::kScale);
    EXPECT_EQ(advice.scale, 0x1p126f);
    EXPECT_EQ(advice.outcome.flushed, 0);
    EXPECT_NE(advice.reason.find("2^126 is the largest possible scale"), std::string::npos)
        << advice.reason;
  }
}

TEST(Advice, GradientsThatOverflowUnscaledGetAScaleBelowOne) {
  const ScaleAdvice advice = advise(count_magnitudes({1e6f, 1e3f}));
  EXPECT_EQ(advice.verdict, Verdict::kScale);
  EXPECT_LT(advice.scale, 1.0f);
  EXPECT_EQ(advice.outcome.overflow, 0);
}

TEST(Advice, NoNonzeroGradientsGiveNoAdvice) {
  for (const std::vector<float>& values :
       {std::vector<float>{}, std::vector<float>{0.0f, -0.0f}, std::vector<float>{kInf, kNan}}) {
    const ScaleAdvice advice = advise(count_magnitudes(values));
    EXPECT_EQ(advice.verdict, Verdict::kNothing);
    EXPECT_EQ(advice.scale, 1.0f);
    EXPECT_FALSE(advice.reason.empty());
  }
}

TEST(Advice, GradientsBeyondEveryScaleAreReported) {
  struct Case {
    std::vector<double> values;
    float scale;
    const char* part;
  };
  const Case cases[] = {
      {{1e300}, 0x1p-126f, "even at 2^-126, the smallest possible scale; at that scale 100 %"},
      {{1e300, 1.0}, 0x1p-126f, "at that scale 50 % overflow, 50 % become zero"},
      {{1e300, 1e-300}, 0x1p-126f, "the largest gradient, 1e+300, is not 8 times below overflow"},
      {{4e42}, 0x1p-126f, "smallest possible scale; at that scale none becomes zero"},
      {{1e-60, 1e-61},
       0x1p126f,
       "too small for fp16 even at 2^126, the largest possible scale; at that scale 100 %"}};
  for (const Case& item : cases) {
    Magnitudes magnitudes;
    magnitudes.add(view(item.values));
    const ScaleAdvice advice = advise(magnitudes);
    EXPECT_EQ(advice.verdict, Verdict::kNoneFits);
    EXPECT_EQ(advice.scale, item.scale);
    EXPECT_NE(advice.reason.find(item.part), std::string::npos) << advice.reason;
  }
}

TEST(Advice, InvalidOptionsAreRefused) {
  for (const double lose : {-0.1, 1.1, std::nan("")}) {
    expect_error(ErrorCode::kInvalidArgument, "from 0 to 1", [&] {
      advise(count_magnitudes({1.0f}), {Format::kFP16, lose});
    });
  }
  expect_error(ErrorCode::kInvalidArgument, "margin", [&] {
    advise(count_magnitudes({1.0f}), {Format::kFP16, 0.1, -1});
  });
}

RC_GTEST_PROP(AdviceProperty, NoSafeScaleLosesLessAndTheRangeIsExact, ()) {
  std::vector<float> values(*rc::gen::inRange<size_t>(1, 60));
  const int low = *rc::gen::inRange(-60, 20);
  const int high = low + *rc::gen::inRange(1, 50);
  for (float& x : values)
    x = std::ldexp(1.0f + 0.001f * static_cast<float>(*rc::gen::inRange(0, 1000)),
                   *rc::gen::inRange(low, high));
  const AdviceOptions options = {*rc::gen::elementOf(kFormats), *rc::gen::element(0.0, 0.01, 0.3),
                                 *rc::gen::inRange(0, 6)};
  const ScaleAdvice advice = advise(count_magnitudes(values), options);
  const auto lost = [&](double scale) {
    return count_by_conversion(values, options.format, scale);
  };
  const auto count = static_cast<double>(values.size());
  const double raised = std::ldexp(1.0, options.margin);
  RC_ASSERT(lost(advice.scale * raised).overflow == 0);
  RC_ASSERT(to_text(advice.outcome) == to_text(lost(advice.scale)));
  for (int power = -90; power <= 90; ++power) {
    const double scale = std::ldexp(1.0, power);
    const Outcome here = lost(scale);
    const bool good =
        here.overflow == 0 && static_cast<double>(here.flushed) / count <= options.lose;
    RC_ASSERT(good == (scale >= advice.lowest && scale <= advice.highest && advice.lowest > 0));
    if (advice.verdict != Verdict::kUnneeded && lost(scale * raised).overflow == 0) {
      RC_ASSERT(here.flushed >= advice.outcome.flushed);
    }
  }
  RC_ASSERT((advice.verdict == Verdict::kNoneFits) ==
            (static_cast<double>(advice.outcome.flushed) / count > options.lose));
}

}  // namespace
}  // namespace headroom
