#include "cli/train/ticks.h"

#include <gtest/gtest.h>

namespace headroom::cli {
namespace {

std::vector<std::string> texts(double low, double high, int base) {
  std::vector<std::string> texts;
  for (const auto& tick : log_ticks(low, high, base)) texts.push_back(tick.second);
  return texts;
}

using Texts = std::vector<std::string>;

TEST(Ticks, LossesWithinADecadeHaveRoundTicks) {
  EXPECT_EQ(texts(4.14, 7.39, 10), (Texts{"5", "6", "7"}));
  EXPECT_EQ(texts(0.21, 0.29, 10), (Texts{"0.22", "0.24", "0.26", "0.28"}));
  EXPECT_EQ(texts(0.8, 1.3, 10), (Texts{"0.8", "0.9", "1", "1.1", "1.2", "1.3"}));
}

TEST(Ticks, LossesOverSeveralDecadesHavePowersOfTen) {
  EXPECT_EQ(texts(3e-10, 2e-6, 10), (Texts{"1e-9", "1e-8", "1e-7", "1e-6"}));
}

TEST(Ticks, ScalesHavePowersOfTwoOnly) {
  EXPECT_EQ(texts(0.93, 1.07, 2), (Texts{"2^0"}));
  EXPECT_EQ(texts(200, 1100, 2), (Texts{"2^8", "2^9", "2^10"}));
  EXPECT_EQ(texts(0.9, 70000, 2),
            (Texts{"2^0", "2^2", "2^4", "2^6", "2^8", "2^10", "2^12", "2^14", "2^16"}));
}

}  // namespace
}  // namespace headroom::cli
