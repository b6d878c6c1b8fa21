#include "inspect/numbers.h"

#include <charconv>
#include <cstdio>

namespace headroom::internal {

double share(int64_t part, int64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string percent(int64_t part, int64_t whole) {
  const double value = 100.0 * share(part, whole);
  if (part == 0) return "0";
  if (part == whole) return "100 %";
  if (value < 0.0001) return "<1e-4 %";
  if (value > 99.99) return ">99.99 %";
  char text[32];
  std::snprintf(text, sizeof text, value < 0.01 ? "%.4f %%" : "%.2f %%", value);
  return text;
}

std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), ",");
  }
  return digits;
}

std::string three_digits(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value, std::chars_format::general, 3).ptr};
}

}  // namespace headroom::internal
