// Scalar conversions of f16 and bf16, over all bit patterns.
#include "tests/support.h"

namespace headroom {
namespace {

// The compiler's own type, where available, is an independent reference.
#ifdef __FLT16_MANT_DIG__
#ifdef __aarch64__
using Half = __fp16;  // GCC 12 has no _Float16 for C++ on ARM
#else
using Half = _Float16;
#endif
uint16_t reference_half(float value) {
  const Half half = static_cast<Half>(value);
  return std::bit_cast<uint16_t>(half);
}
float reference_float(uint16_t bits) { return static_cast<float>(std::bit_cast<Half>(bits)); }
#endif

uint16_t half_bits(float value) { return f16(value).bits; }
uint16_t bfloat_bits(float value) { return bf16(value).bits; }

TEST(F16, EveryBitPatternRoundTripsThroughFloat) {
  for (const f16 half : all_patterns<f16>()) {
    const float wide = static_cast<float>(half);
    const bool nan = (half.bits & 0x7FFF) > 0x7C00;
    ASSERT_EQ(std::isnan(wide), nan) << half.bits;
    const uint16_t expected = static_cast<uint16_t>(half.bits | (nan ? 0x0200 : 0));
    ASSERT_EQ(half_bits(wide), expected);
  }
}

#ifdef __FLT16_MANT_DIG__
TEST(F16, EveryBitPatternMatchesTheCompiler) {
  for (const f16 half : all_patterns<f16>()) {
    const float wide = static_cast<float>(half);
    if (std::isnan(wide)) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(wide), std::bit_cast<uint32_t>(reference_float(half.bits)));
  }
}

TEST(F16, RoundsToNearestEvenBetweenAdjacentValues) {
  for (uint16_t bits = 0; bits < 0x7C00; ++bits) {
    const float low = static_cast<float>(f16::from_bits(bits));
    const float high = bits == 0x7BFF
                           ? 65536.0f
                           : static_cast<float>(f16::from_bits(static_cast<uint16_t>(bits + 1)));
    const float middle = low + (high - low) / 2;
    for (const float value : {low, middle, std::nextafterf(middle, 0.0f),
                              std::nextafterf(middle, kInf), std::nextafterf(high, 0.0f)}) {
      ASSERT_EQ(half_bits(value), reference_half(value)) << value;
      ASSERT_EQ(half_bits(-value), reference_half(-value)) << value;
    }
  }
}
#endif

TEST(F16, RangeLimitsAndSubnormalsRoundCorrectly) {
  EXPECT_EQ(half_bits(65504.0f), 0x7BFF);
  EXPECT_EQ(half_bits(65519.996f), 0x7BFF);
  EXPECT_EQ(half_bits(65520.0f), 0x7C00);
  EXPECT_EQ(half_bits(1e30f), 0x7C00);
  EXPECT_EQ(half_bits(-kInf), 0xFC00);
  EXPECT_EQ(half_bits(0x1p-24f), 0x0001);
  EXPECT_EQ(half_bits(0x1p-25f), 0x0000);
  EXPECT_EQ(half_bits(std::nextafterf(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(half_bits(1.5f * 0x1p-24f), 0x0002);
  EXPECT_EQ(half_bits(2.5f * 0x1p-24f), 0x0002);
  EXPECT_EQ(half_bits(-0.0f), 0x8000);
  EXPECT_EQ(half_bits(1e-40f), 0x0000);
}

TEST(BF16, EveryBitPatternRoundTripsThroughFloat) {
  for (const bf16 value : all_patterns<bf16>()) {
    const float wide = static_cast<float>(value);
    const bool nan = (value.bits & 0x7FFF) > 0x7F80;
    ASSERT_EQ(std::isnan(wide), nan);
    ASSERT_EQ(bfloat_bits(wide), static_cast<uint16_t>(value.bits | (nan ? 0x0040 : 0)));
  }
}

TEST(BF16, RoundsToNearestEvenBetweenAdjacentValues) {
  for (uint16_t bits = 0; bits < 0x7F80; ++bits) {
    const double low = static_cast<float>(bf16::from_bits(bits));
    const double step = std::ldexp(1.0, std::max(1, bits >> 7) - 127 - 7);
    const float middle = static_cast<float>(low + step / 2);  // exact: one more bit than bf16
    const uint16_t even = static_cast<uint16_t>(bits + (bits & 1));
    ASSERT_EQ(bfloat_bits(middle), even);
    ASSERT_EQ(bfloat_bits(std::nextafterf(middle, 0.0f)), bits);
    ASSERT_EQ(bfloat_bits(std::nextafterf(middle, kInf)), bits + 1);
    ASSERT_EQ(bfloat_bits(-middle), even | 0x8000);
  }
}

TEST(Float16, NanStaysNan) {
  for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7F808000u}) {
    EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(bits)))));
    EXPECT_TRUE(std::isnan(static_cast<float>(f16(std::bit_cast<float>(bits)))));
  }
}

}  // namespace
}  // namespace headroom
