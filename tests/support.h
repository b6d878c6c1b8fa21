// Helpers that all C++ tests share: error expectations, random data, comparison of bits.
#ifndef HEADROOM_TESTS_SUPPORT_H_
#define HEADROOM_TESTS_SUPPORT_H_

#include <gtest/gtest.h>
#include <headroom/headroom.h>
#include <headroom/tools.h>  // before the names below, which its enumerators would shadow

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace headroom {

/// Fixture that runs each test on every SIMD target that this machine supports, and restores the
/// previous target and thread count.
class EveryTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    before_ = simd_target();
    set_simd_target(GetParam());
  }
  void TearDown() override {
    set_simd_target(before_);
    set_num_threads(0);
  }

 private:
  std::string before_;
};

#define HEADROOM_ON_EVERY_TARGET(Suite)                                       \
  INSTANTIATE_TEST_SUITE_P(Targets, Suite, testing::ValuesIn(simd_targets()), \
                           [](const auto& target) { return target.param; })

/// Expects `call` to throw an Error with this code and a message that contains `part`.
inline void expect_error(ErrorCode code, const std::string& part,
                         const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error was thrown; expected '" << part << "'";
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), std::string(to_string(code))) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <typename T>
T from_float(double value) {
  return T(static_cast<float>(value));
}
template <>
inline double from_float<double>(double value) {
  return value;
}

template <typename T>
double to_double(T value) {
  return static_cast<double>(static_cast<float>(value));
}
template <>
inline double to_double<double>(double value) {
  return value;
}

template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, f16>) return DType::kF16;
  if constexpr (std::is_same_v<T, bf16>) return DType::kBF16;
  if constexpr (std::is_same_v<T, double>) return DType::kF64;
  return DType::kF32;
}

/// Normally distributed values with a standard deviation of `size`.
template <typename T>
std::vector<T> random_values(size_t count, uint32_t seed, double size = 1.0) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0.0, size);
  std::vector<T> values(count);
  for (T& value : values) value = from_float<T>(normal(generator));
  return values;
}

/// Overwrites `to` in place, so that views of it stay valid. Both vectors have the same size.
template <typename T>
void refill(std::vector<T>& to, const std::vector<T>& from) {
  std::copy(from.begin(), from.end(), to.begin());
}

/// Every bit pattern of a 16-bit type, in order.
template <typename T>
std::vector<T> all_patterns() {
  std::vector<T> values(65536);
  for (size_t i = 0; i < values.size(); ++i) values[i] = T::from_bits(static_cast<uint16_t>(i));
  return values;
}

/// The bytes of a vector, for bitwise comparison (NaN compares equal to itself).
template <typename T>
std::vector<unsigned char> bytes_of(const std::vector<T>& values) {
  std::vector<unsigned char> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// The fields of `stats` that must have the same bits on every SIMD target and thread count.
inline std::string fingerprint(const GradStats& stats) {
  std::string text;
  for (const int64_t value : {stats.count, stats.inf_count, stats.nan_count, stats.culprit,
                              stats.culprit_inf, stats.culprit_nan}) {
    text += std::to_string(value) + " ";
  }
  for (const double sum : stats.squares) {
    text += std::to_string(std::bit_cast<uint64_t>(sum)) + " ";
  }
  return text + std::to_string(std::bit_cast<uint64_t>(stats.amax));
}

}  // namespace headroom

#endif  // HEADROOM_TESTS_SUPPORT_H_
