#include "record/events.h"

#include <gtest/gtest.h>

namespace headroom::internal {
namespace {

// RFC 3720, B.4. The file as a whole is read by tests/cli/report_test.py, with a reader of its own.
TEST(Events, CrcIsCastagnolis) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(Events, TagsAreText) {  // protocol buffers refuse a string that is not UTF-8
  Summary summary;
  summary.scalar("bad\xFF", 1.0);
  EXPECT_EQ(summary.bytes().find('\xFF'), std::string::npos);
}

TEST(Events, AHistogramOfNothingIsLeftOut) {
  Summary summary;
  summary.log2_histogram("w", GradDetail());
  EXPECT_TRUE(summary.bytes().empty());
}

}  // namespace
}  // namespace headroom::internal
