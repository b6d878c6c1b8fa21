// convert() on every SIMD target against the scalar conversions of f16 and bf16.
#include "tests/support.h"

namespace headroom {
namespace {

class Convert : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(Convert);

// Every value of a 16-bit type, and floats on both sides of each rounding boundary: 0x1000 is half
// a unit of f16, 0x8000 half a unit of bf16.
template <typename T>
std::vector<float> rounding_boundaries() {
  std::vector<float> values;
  for (const T pattern : all_patterns<T>()) {
    const float value = static_cast<float>(pattern);
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    for (const uint32_t offset : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u}) {
      values.push_back(std::bit_cast<float>(bits + offset));
    }
  }
  return values;
}

template <typename T>
void expect_widening_matches_reference() {
  const std::vector<T> patterns = all_patterns<T>();
  std::vector<float> wide(patterns.size());
  convert(view(patterns), view(wide));
  for (size_t i = 0; i < patterns.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]),
              std::bit_cast<uint32_t>(static_cast<float>(patterns[i])))
        << patterns[i].bits;
  }
}

template <typename T>
void expect_narrowing_matches_reference() {
  const std::vector<float> values = rounding_boundaries<T>();
  std::vector<T> narrow(values.size());
  convert(view(values), view(narrow));
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(narrow[i].bits, T(values[i]).bits) << std::bit_cast<uint32_t>(values[i]);
  }
}

TEST_P(Convert, WideningMatchesTheScalarReference) {
  expect_widening_matches_reference<f16>();
  expect_widening_matches_reference<bf16>();
}

TEST_P(Convert, NarrowingMatchesTheScalarReference) {
  expect_narrowing_matches_reference<f16>();
  expect_narrowing_matches_reference<bf16>();
}

TEST_P(Convert, ConvertsBetweenBF16AndF16) {
  const std::vector<bf16> patterns = all_patterns<bf16>();
  std::vector<f16> halves(patterns.size());
  convert(view(patterns), view(halves));
  for (size_t i = 0; i < patterns.size(); ++i) {
    ASSERT_EQ(halves[i].bits, f16(static_cast<float>(patterns[i])).bits);
  }
}

TEST_P(Convert, WritesOnlyTheGivenElementsAtAnyLengthAndOffset) {
  const std::vector<float> values = random_values<float>(200, 1);
  for (int64_t count = 0; count < 70; ++count) {
    for (size_t offset = 0; offset < 3; ++offset) {
      std::vector<f16> out(200, f16(7.0f));
      convert(view(values.data() + offset, count), view(out.data() + offset, count));
      for (size_t i = 0; i < out.size(); ++i) {
        const bool inside = i >= offset && i < offset + static_cast<size_t>(count);
        ASSERT_EQ(out[i].bits, f16(inside ? values[i] : 7.0f).bits) << count << " " << i;
      }
    }
  }
}

TEST(ConvertChecks, RejectsMismatchedUnsupportedOrOverlappingViews) {
  std::vector<float> wide(4);
  std::vector<f16> half(3);
  std::vector<double> doubles(4);
  expect_error(ErrorCode::kMismatch, "4 elements", [&] { convert(view(wide), view(half)); });
  expect_error(ErrorCode::kUnsupported, "f64", [&] { convert(view(doubles), view(wide)); });
  expect_error(ErrorCode::kInvalidArgument, "share memory", [&] {
    convert(view(wide.data(), 2), view(reinterpret_cast<f16*>(wide.data()), 2));
  });
}

}  // namespace
}  // namespace headroom
