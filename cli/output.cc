#include "cli/output.h"

#include <fmt/format.h>
#include <headroom/error.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace headroom::cli {

void tell(const std::string& text) noexcept {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

std::string scale_text(float scale) {
  int exponent = 0;
  const bool power = std::frexp(scale, &exponent) == 0.5f;
  return power ? fmt::format("2^{}", exponent - 1) : fmt::format("{:.6g}", scale);
}

std::string scale_number(double scale) {
  const bool whole = scale == std::floor(scale) && scale < 0x1p53;
  return whole ? fmt::format("{:.0f}", scale) : fmt::format("{}", static_cast<float>(scale));
}

nlohmann::ordered_json scale_json(float scale) {
  const bool whole = scale == std::floor(scale) && scale < 0x1p53f;
  if (whole) return static_cast<int64_t>(scale);
  return scale;
}

double plain_nan(double value) { return std::isnan(value) ? std::nan("") : value; }

std::string duration(double seconds) {
  if (!(seconds < 1e8)) return "?";
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
}

int terminal_width(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string progress_bar(int room, double share) {
  room = std::clamp(room, 0, 30);
  if (room < 5) return "";
  const auto full = static_cast<int>(room * std::clamp(share, 0.0, 1.0));
  return fmt::format("[{}{}] ", std::string(static_cast<size_t>(full), '#'),
                     std::string(static_cast<size_t>(room - full), '.'));
}

void refuse(const std::string& sentence) { throw Error(ErrorCode::kInvalidArgument, sentence); }

}  // namespace headroom::cli
