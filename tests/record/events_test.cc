#include "record/events.h"

#include <gtest/gtest.h>

namespace headroom::internal {
namespace {

// Test vectors of RFC 3720, B.4. tests/cli/report_test.py reads whole files with an independent
// reader.
TEST(Events, ChecksumIsCrc32c) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  EXPECT_EQ(crc32c(""), 0u);
}

// Protocol buffers refuse strings that are not UTF-8.
TEST(Events, TagsAreValidUtf8) {
  Summary summary;
  summary.scalar("bad\xFF", 1.0);
  EXPECT_EQ(summary.bytes().find('\xFF'), std::string::npos);
}

TEST(Events, SettingsThatAreFiniteNumbersBecomeNumbers) {
  const auto size = [](const char* text) {
    Summary summary;
    summary.session_start({{"x", text}});
    return summary.bytes().size();
  };
  // A number is a key of one byte and a double, a text a key, its length and its characters.
  for (const char* number : {"1", "-2", "0.001", "1e-3"})
    EXPECT_EQ(size(number), size("0")) << number;
  for (const char* text : {"", "nan", "inf", "1x", "0x10", "1 "}) {
    EXPECT_EQ(size(text) + 7, size("0") + std::string(text).size()) << text;
  }
}

TEST(Events, EmptyHistogramIsOmitted) {
  Summary summary;
  summary.log2_histogram("w", GradDetail());
  EXPECT_TRUE(summary.bytes().empty());
}

}  // namespace
}  // namespace headroom::internal
