// The formats of masters and moments, as scalar functions: every code, every boundary, and rounding
// compared with double arithmetic. The kernels are compared with the same model in compact_test.cc.
#include "apply/formats.h"

#include <random>

#include "tests/apply/compact_model.h"
#include "tests/support.h"

namespace headroom {
namespace {

using internal::bits_float;
using internal::float_bits;

// All bit patterns of finite weights.
template <typename W>
std::vector<W> finite_weights() {
  std::vector<W> all;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const W weight = W::from_bits(static_cast<uint16_t>(bits));
    if (std::isfinite(static_cast<float>(weight))) all.push_back(weight);
  }
  return all;
}

template <typename W, int kBits>
void expect_split_undoes_join() {
  using Split = internal::SplitMaster<W, kBits>;
  constexpr int kLowest = -(1 << (kBits - 1)), kHighest = -kLowest - 1;
  constexpr uint32_t kNearest = Split::kDropped > 0 ? (1u << Split::kDropped) / 2 : 0;
  for (const W weight : finite_weights<W>()) {
    for (const int below : {kLowest, kLowest + 1, -1, 0, 1, kHighest - 1, kHighest}) {
      const Split stored{weight, static_cast<typename Split::Remainder>(below)};
      const float master = stored.join();
      ASSERT_TRUE(std::isfinite(master));
      if (kBits == 16 && std::is_same_v<W, f16> && below % 8 != 0) continue;  // more than a float
      const bool zero = (weight.bits & 0x7FFFu) == 0;
      if (zero && below < 0) {
        ASSERT_EQ(master, 0.0f);
        continue;
      }
      for (const uint32_t dither : {0u, kNearest, (1u << Split::kDropped) - 1}) {
        const Split again = Split::split(master, dither);
        ASSERT_EQ(again.weight.bits, weight.bits) << below << " " << dither;
        ASSERT_EQ(again.remainder, stored.remainder) << weight.bits << " " << dither;
      }
    }
  }
}

TEST(SplitMasters, SplitUndoesJoinForAllWeightsAndBoundaryRemainders) {
  expect_split_undoes_join<f16, 8>();
  expect_split_undoes_join<f16, 16>();
  expect_split_undoes_join<bf16, 8>();
  expect_split_undoes_join<bf16, 16>();
}

template <typename W, int kBits>
void expect_split_rounds_like_the_model() {
  using Split = internal::SplitMaster<W, kBits>;
  std::mt19937 random(kBits);
  for (int i = 0; i < 2000000; ++i) {
    const float value = bits_float(static_cast<uint32_t>(random()));
    if (!std::isfinite(value)) continue;
    if (std::is_same_v<W, f16> && std::fabs(value) >= 65504.0f) continue;
    const auto dither = static_cast<uint32_t>(random()) & ((1u << Split::kDropped) - 1);
    const Split stored = Split::split(value, dither);
    const float expected = model_master<W>(value, kBits, dither);
    ASSERT_EQ(float_bits(stored.join()), float_bits(expected)) << value;
    const float weight = static_cast<float>(stored.weight);
    ASSERT_EQ(float_bits(weight), float_bits(model_weight<W>(expected))) << value;
  }
}

TEST(SplitMasters, SplitRoundsAsDoubleArithmeticDoes) {
  expect_split_rounds_like_the_model<f16, 8>();
  expect_split_rounds_like_the_model<f16, 16>();
  expect_split_rounds_like_the_model<bf16, 8>();
  expect_split_rounds_like_the_model<bf16, 16>();
}

TEST(SplitMasters, Bf16With16BitsBelowIsFp32) {
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    if (std::isnan(bits_float(bits))) continue;
    const float joined = internal::SplitMaster<bf16, 16>::split(bits_float(bits), 0).join();
    ASSERT_EQ(float_bits(joined), bits);
  }
}

TEST(SplitMasters, InfStaysInfAndNanNeverBecomesANumber) {
  const auto unusable = [](auto weight) { return !std::isfinite(static_cast<float>(weight)); };
  for (const float value : {kInf, -kInf, kNan, -kNan, bits_float(0x7FFFFFFFu)}) {
    EXPECT_TRUE(unusable(internal::SplitMaster<f16, 8>::split(value, 31).weight));
    EXPECT_TRUE(unusable(internal::SplitMaster<f16, 16>::split(value, 0).weight));
    EXPECT_TRUE(unusable(internal::SplitMaster<bf16, 8>::split(value, 255).weight));
    EXPECT_TRUE(unusable(internal::SplitMaster<bf16, 16>::split(value, 0).weight));
  }
}

template <typename Code>
void expect_codes_stay(uint32_t lowest) {
  for (uint32_t exponent = lowest; exponent <= 252; ++exponent) {
    for (uint32_t code = 0; code < 256; ++code) {
      const float value = Code::decode(static_cast<uint8_t>(code), exponent);
      ASSERT_TRUE(std::isfinite(value)) << exponent << " " << code;
      for (const uint32_t dither : {0u, internal::kNearestMoment, 0xFFFFFu}) {
        ASSERT_EQ(Code::encode(value, exponent, dither), code) << exponent << " " << dither;
      }
    }
  }
}

TEST(MomentCodes, EveryCodeOfEveryExponentIsStoredAgainExactly) {
  expect_codes_stay<internal::FirstMoment>(18);
  expect_codes_stay<internal::SecondMoment>(32);
}

// Of the same values with the smallest exponent that fits: what a resumed run computes.
template <typename Code>
void expect_groups_stay(uint32_t seed) {
  std::mt19937 random(seed);
  for (int trial = 0; trial < 200000; ++trial) {
    const auto exponent = static_cast<uint32_t>(32 + random() % 221);
    float values[32];
    uint32_t largest = 0;
    for (float& value : values) {
      value = Code::decode(static_cast<uint8_t>(random() >> random() % 32), exponent);
      largest = internal::larger(largest, internal::moment_magnitude(value));
    }
    const uint32_t again = Code::exponent(largest);
    for (const float value : values) {
      const uint8_t code = Code::encode(value, again, static_cast<uint32_t>(random()) >> 12);
      ASSERT_EQ(float_bits(Code::decode(code, again)), float_bits(value)) << exponent;
    }
  }
}

TEST(MomentCodes, AGroupKeepsItsValuesUnderItsOwnExponent) {
  expect_groups_stay<internal::FirstMoment>(1);
  expect_groups_stay<internal::SecondMoment>(2);
}

TEST(MomentCodes, RoundingIsThatOfDoubleArithmetic) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100000; ++trial) {
    std::vector<float> values(32);
    const int top = static_cast<int>(random() % 180) - 100;
    for (float& value : values) {
      value = std::ldexp(static_cast<float>(static_cast<int32_t>(random())),
                         top - 31 - static_cast<int>(random() % 40));
      if (random() % 10 == 0) value = 0.0f;
    }
    uint32_t largest = 0;
    for (const float value : values)
      largest = internal::larger(largest, internal::moment_magnitude(value));
    const int group = group_exponent(values, 0, 32);
    const uint32_t e1 = internal::FirstMoment::exponent(largest);
    const uint32_t e2 = internal::SecondMoment::exponent(largest);
    for (const float value : values) {
      const uint32_t dither = static_cast<uint32_t>(random()) >> 12;
      const uint8_t c1 = internal::FirstMoment::encode(value, e1, dither);
      ASSERT_EQ(float_bits(internal::FirstMoment::decode(c1, e1)),
                float_bits(model_first(value, group, dither)))
          << value << " in 2^" << group;
      const float positive = std::fabs(value);
      const uint8_t c2 = internal::SecondMoment::encode(positive, e2, dither);
      const float second = internal::SecondMoment::decode(c2, e2);
      ASSERT_EQ(float_bits(second), float_bits(model_second(positive, group, dither)))
          << positive << " in 2^" << group;
    }
  }
}

TEST(MomentCodes, InfAndNanAreStoredAsLargeNumbers) {
  for (const float value : {kInf, -kInf, kNan, bits_float(0x7FFFFFFFu), 3e38f}) {
    const uint32_t largest = internal::moment_magnitude(value);
    const uint32_t e1 = internal::FirstMoment::exponent(largest);
    const uint32_t e2 = internal::SecondMoment::exponent(largest);
    for (const uint32_t dither : {0u, 0xFFFFFu}) {
      const uint8_t c1 = internal::FirstMoment::encode(value, e1, dither);
      EXPECT_GT(std::fabs(internal::FirstMoment::decode(c1, e1)), 5e37f);
      EXPECT_TRUE(std::isfinite(internal::FirstMoment::decode(c1, e1)));
      const uint8_t c2 = internal::SecondMoment::encode(value, e2, dither);
      EXPECT_TRUE(std::isfinite(internal::SecondMoment::decode(c2, e2)));
      EXPECT_TRUE(std::isfinite(static_cast<float>(internal::encode_moment(value, dither >> 4))));
    }
  }
}

TEST(MomentCodes, EmptyGroupsAreZero) {
  EXPECT_EQ(internal::SecondMoment::exponent(0), 0u);
  EXPECT_EQ(internal::SecondMoment::decode(internal::SecondMoment::encode(0.0f, 0, 0xFFFFFu), 0),
            0.0f);
  const uint32_t exponent = internal::FirstMoment::exponent(0);
  EXPECT_EQ(internal::FirstMoment::encode(0.0f, exponent, 0xFFFFFu), 0);
}

TEST(Dither, IsUniformForEveryElementOfAHash) {
  for (uint32_t element = 0; element < 8; ++element) {
    double moment = 0.0, master = 0.0;
    constexpr uint32_t kTimes = 100000;
    for (uint32_t i = 0; i < kTimes; ++i) {
      const uint32_t word = internal::dither_word(8 * i + element, 77);
      moment += internal::dither_of<20>(word) / 1048576.0 / kTimes;
      master += internal::dither_of<8>(word) / 256.0 / kTimes;
    }
    EXPECT_NEAR(moment, 0.5, 0.005);
    EXPECT_NEAR(master, 0.498, 0.005);
  }
}

}  // namespace
}  // namespace headroom
