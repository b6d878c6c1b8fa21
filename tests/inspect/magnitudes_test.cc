// Compares the counts with a slow reference that converts every element.
#include <gtest/gtest.h>
#include <headroom/inspect.h>
#include <headroom/weights.h>
#include <rapidcheck/gtest.h>

#include "tests/inspect/reference.h"

namespace headroom {
namespace {

template <typename T>
void expect_counts_of_reference(const std::vector<T>& values, const std::vector<int>& powers) {
  Magnitudes seen;
  seen.add(view(values));
  ASSERT_EQ(seen.count(), static_cast<int64_t>(values.size()));
  WeightInspector inspector;
  inspector.add("w", view(values));
  const WeightTensor weights = inspector.finish().tensors.at(0);
  EXPECT_EQ(weights.count, seen.count());
  EXPECT_EQ(weights.zeros, seen.zeros());
  EXPECT_EQ(weights.infs, seen.infs());
  EXPECT_EQ(weights.nans, seen.nans());
  EXPECT_EQ(weights.largest, seen.largest());
  EXPECT_EQ(weights.smallest, seen.smallest());
  EXPECT_EQ(to_text(weights.fp16), to_text(count_by_conversion(values, Format::kFP16, 1.0)));
  for (const Format format : kFormats) {
    for (const int power : powers) {
      const double scale = std::ldexp(1.0, power);
      const Outcome expected = count_by_conversion(values, format, scale);
      const std::string where = std::string(limits(format).name) + " at 2^" + std::to_string(power);
      EXPECT_EQ(to_text(seen.at(format, power)), to_text(expected)) << where;
      EXPECT_EQ(to_text(outcome_at(view(values), format, static_cast<float>(scale))),
                to_text(expected))
          << where;
    }
  }
}

const std::vector<int> kPowers = {-126, -40, -17, -3, -1, 0, 1, 2, 7, 10, 16, 24, 37, 60, 126};

class Counting : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(Counting);

TEST_P(Counting, EveryF16IsCountedAsItConverts) {
  expect_counts_of_reference(all_patterns<f16>(), kPowers);
}

TEST_P(Counting, EveryBF16IsCountedAsItConverts) {
  expect_counts_of_reference(all_patterns<bf16>(), kPowers);
}

// The range ends of every format, divided by each power of two, with the numbers just below and
// above: where an off-by-one in a bin boundary would show.
TEST_P(Counting, NeighboursOfEveryRangeEndAreCountedExactly) {
  std::vector<float> floats;
  std::vector<double> doubles;
  for (const Format format : kFormats) {
    const FormatLimits& limit = limits(format);
    for (const double end : {limit.flush, limit.normal, limit.overflow, 0x1p-14, 0x1p-24}) {
      for (const int power : kPowers) {
        const double x = std::ldexp(end, -power);
        const float f = static_cast<float>(x);
        for (const float y : {f, std::nextafterf(f, 0.0f), std::nextafterf(f, kInf)}) {
          floats.push_back(y);
          floats.push_back(-y);
        }
        for (const double y : {x, std::nextafter(x, 0.0), std::nextafter(x, 1e308)}) {
          doubles.push_back(y);
          doubles.push_back(-y);
        }
      }
    }
  }
  expect_counts_of_reference(floats, kPowers);
  expect_counts_of_reference(doubles, kPowers);
}

TEST_P(Counting, RandomBitPatternsAreCountedExactly) {
  std::mt19937_64 random(7);
  std::vector<float> floats(5000);
  std::vector<double> doubles(5000);
  for (float& x : floats) x = std::bit_cast<float>(static_cast<uint32_t>(random()));
  for (double& x : doubles) x = std::bit_cast<double>(random());
  for (size_t i = 0; i < 2000; ++i) {  // doubles in the range of floats, and FP32 subnormals
    doubles[i] = std::bit_cast<float>(static_cast<uint32_t>(random()));
    floats[i] = std::bit_cast<float>(static_cast<uint32_t>(random() & 0x807FFFFFu));
  }
  expect_counts_of_reference(floats, kPowers);
  expect_counts_of_reference(doubles, kPowers);
}

TEST_P(Counting, ZerosInfinitiesAndNaNsAreCountedSeparately) {
  const std::vector<float> values = {0.0f, -0.0f, kInf, -kInf, kNan, -kNan, 1.0f, -3.0f, 1e-45f};
  Magnitudes seen;
  seen.add(view(values));
  EXPECT_EQ(seen.zeros(), 2);
  EXPECT_EQ(seen.infs(), 2);
  EXPECT_EQ(seen.nans(), 2);
  EXPECT_EQ(seen.nonzero(), 3);
  EXPECT_EQ(seen.largest(), 3.0);
  EXPECT_EQ(seen.smallest(), 0x1p-149);
}

TEST_P(Counting, UnalignedDataOfAnyLengthIsCounted) {
  std::vector<char> bytes(4 * 3000 + 1);
  std::mt19937 random(3);
  for (char& byte : bytes) byte = static_cast<char>(random());
  for (const int64_t count : {0, 1, 7, 1023, 1024, 1025, 2999}) {
    std::vector<float> copy(static_cast<size_t>(count));
    if (count > 0) std::memcpy(copy.data(), bytes.data() + 1, copy.size() * sizeof(float));
    Magnitudes seen;
    seen.add(view(static_cast<const void*>(bytes.data() + 1), DType::kF32, count));
    EXPECT_EQ(to_text(seen.at(Format::kFP16, 5)),
              to_text(count_by_conversion(copy, Format::kFP16, 32.0)));
  }
}

RC_GTEST_PROP(CountingProperty, CountsAreExactForAnyScaleAndType, ()) {
  const float mantissa = 1.0f + static_cast<float>(*rc::gen::inRange(0, 1 << 23)) * 0x1p-23f;
  const float scale = std::ldexp(mantissa, *rc::gen::inRange(-60, 61));
  const Format format = *rc::gen::elementOf(kFormats);
  // Around the range ends, where products are rounding ties or just miss one.
  const FormatLimits& limit = limits(format);
  std::vector<float> floats;
  std::vector<double> doubles;
  for (const double end : {limit.flush, limit.normal, limit.overflow}) {
    const double x = end / scale;
    for (int i = -3; i <= 3; ++i) {
      floats.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(x)) +
                                            static_cast<uint32_t>(i)));
      doubles.push_back(
          std::bit_cast<double>(std::bit_cast<uint64_t>(x) + static_cast<uint64_t>(i)));
    }
  }
  const auto halves = all_patterns<f16>();
  RC_ASSERT(to_text(outcome_at(view(floats), format, scale)) ==
            to_text(count_by_conversion(floats, format, scale)));
  RC_ASSERT(to_text(outcome_at(view(doubles), format, scale)) ==
            to_text(count_by_conversion(doubles, format, scale)));
  RC_ASSERT(to_text(outcome_at(view(halves), format, scale)) ==
            to_text(count_by_conversion(halves, format, scale)));
}

RC_GTEST_PROP(CountingProperty, MergingEqualsCountingAll, ()) {
  std::vector<float> all;
  Magnitudes merged;
  const int parts = *rc::gen::inRange(0, 5);
  for (int part = 0; part < parts; ++part) {
    std::vector<float> values(*rc::gen::inRange<size_t>(0, 50));
    for (float& x : values) x = std::bit_cast<float>(*rc::gen::arbitrary<uint32_t>());
    Magnitudes seen;
    seen.add(view(values));
    merged.merge(seen);
    all.insert(all.end(), values.begin(), values.end());
  }
  Magnitudes whole;
  whole.add(view(all));
  for (const Format format : kFormats) {
    for (const int power : {-30, 0, 16}) {
      RC_ASSERT(to_text(whole.at(format, power)) == to_text(merged.at(format, power)));
    }
  }
  RC_ASSERT(whole.nonzero() == merged.nonzero() && whole.zeros() == merged.zeros());
  RC_ASSERT(whole.largest() == merged.largest() && whole.smallest() == merged.smallest());
}

TEST(Magnitudes, CountsDoNotDependOnTheNumberOfThreads) {
  std::vector<f16> values((size_t{1} << 24) + 12345);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = f16::from_bits(static_cast<uint16_t>(i % 3 == 0 ? 0 : i * 2654435761u >> 13));
  }
  std::vector<std::string> results;
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    Magnitudes seen;
    seen.add(view(values));
    results.push_back(to_text(seen.at(Format::kFP16, 3)) + to_text(seen.at(Format::kE4M3, -2)) +
                      std::to_string(seen.zeros()));
    EXPECT_EQ(to_text(seen.at(Format::kE5M2, 1)),
              to_text(outcome_at(view(values), Format::kE5M2, 2.0f)));
  }
  set_num_threads(0);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Magnitudes, InvalidArgumentsAreRefused) {
  Magnitudes seen;
  expect_error(ErrorCode::kInvalidArgument, "null data",
               [&] { seen.add(view(static_cast<float*>(nullptr), 3)); });
  expect_error(ErrorCode::kInvalidArgument, "2^127", [&] { seen.at(Format::kFP16, 127); });
  const std::vector<float> one = {1.0f};
  for (const float scale : {0.0f, -1.0f, kInf, kNan}) {
    expect_error(ErrorCode::kInvalidArgument, "out of range",
                 [&] { outcome_at(view(one), Format::kFP16, scale); });
  }
  EXPECT_EQ(seen.count(), 0);
}

}  // namespace
}  // namespace headroom
