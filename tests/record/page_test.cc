#include "record/page.h"

#include <gtest/gtest.h>

namespace headroom::internal {
namespace {

TEST(Page, HtmlSpecialCharactersAreEscaped) {
  EXPECT_EQ(escape("layer.0.weight"), "layer.0.weight");
  EXPECT_EQ(escape("</script><b a='1' b=\"2\">&"),
            "&lt;/script&gt;&lt;b a=&#39;1&#39; b=&quot;2&quot;&gt;&amp;");
  EXPECT_EQ(escape("h\xC3\xA9\xE2\x82\xAC\xF0\x9F\x9A\x80"),
            "h\xC3\xA9\xE2\x82\xAC\xF0\x9F\x9A\x80");
}

TEST(Page, InvalidAndControlCharactersAreReplaced) {
  constexpr const char* kReplaced = "\xEF\xBF\xBD";
  for (const char* bad : {"\xFF", "\x80", "\xC0", "\x01", "\x7F"})
    EXPECT_EQ(escape(bad), kReplaced);
  for (const char* steering :
       {"\u009b", "\u061c", "\u200e", "\u200f", "\u2028", "\u202a", "\u202e", "\u2066", "\u2069"}) {
    EXPECT_EQ(escape(steering), kReplaced) << "it would change the direction of the text";
  }
  for (const char* shown :
       {"\t", "\n", "\u00a0", "\u061d", "\u200d", "\u2027", "\u202f", "\u206a"}) {
    EXPECT_EQ(escape(shown), shown);
  }
  EXPECT_EQ(escape(std::string_view("a\0b", 3)), std::string("a") + kReplaced + "b");
  EXPECT_EQ(escape("\xC3"), kReplaced) << "a truncated character";
  EXPECT_EQ(escape("\xC0\xAF"), std::string(kReplaced) + kReplaced) << "an overlong '/'";
  EXPECT_EQ(escape("\xED\xA0\x80").find("\xED"), std::string::npos) << "a surrogate";
  EXPECT_EQ(escape("\xF4\x90\x80\x80").find("\xF4"), std::string::npos) << "beyond Unicode";
}

TEST(Page, PageIsCompleteAndLoadsNothing) {
  const std::string html = page("a < b", "<p>body</p>");
  EXPECT_EQ(html.find("<!doctype html>"), 0u);
  EXPECT_NE(html.find("<title>a &lt; b</title>"), std::string::npos);
  EXPECT_NE(html.find("<p>body</p>"), std::string::npos);
  EXPECT_NE(html.find("prefers-color-scheme: dark"), std::string::npos);
  EXPECT_NE(html.find("name=\"viewport\""), std::string::npos);
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
  EXPECT_EQ(html.find("http://"), std::string::npos);
  EXPECT_EQ(html.find("https://"), std::string::npos);
}

}  // namespace
}  // namespace headroom::internal
