#include "cli/output.h"

#include <fmt/format.h>
#include <headroom/error.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <new>
#include <nlohmann/json.hpp>

#include "record/text.h"

namespace headroom::cli {
namespace {

int output_error = 0;  // the first that standard output had

void write_error(std::string_view text) noexcept {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

// Calls use(character, steers) for every UTF-8 character; steers for broken ones too.
template <typename Use>
void for_characters(std::string_view text, const Use& use) {
  while (!text.empty()) {
    const size_t length = internal::character_length(text);
    const std::string_view character = text.substr(0, std::max<size_t>(1, length));
    use(character, length == 0 || internal::steers_text(character));
    text.remove_prefix(character.size());
  }
}

}  // namespace

std::string shown(std::string_view text) {
  std::string safe;
  safe.reserve(text.size());
  for_characters(text, [&](std::string_view character, bool steers) {
    safe += steers && character != "\n" && character != "\t" ? "?" : character;
  });
  return safe;
}

void tell(const std::string& text) noexcept {
  try {
    std::string line = shown(text);
    const size_t end = line.ends_with('\n') ? line.size() - 1 : line.size();
    std::replace(line.begin(), line.begin() + static_cast<std::ptrdiff_t>(end), '\n', ' ');
    write_error(line);
  } catch (const std::bad_alloc&) {
    write_error("headroom: There is no memory left to say what is wrong.\n");
  }
}

void redraw(const std::string& line) noexcept {
  try {
    write_error("\r" + shown(line) + "\x1b[K");
  } catch (const std::bad_alloc&) {  // the next line may fit
  }
}

void print_text(const std::string& text) noexcept {
  try {
    const std::string safe = shown(text);
    if (std::fwrite(safe.data(), 1, safe.size(), stdout) == safe.size()) return;
    if (output_error == 0) output_error = errno != 0 ? errno : EIO;
  } catch (const std::bad_alloc&) {
    output_error = ENOMEM;
  }
}

int flush_output() noexcept {
  if (std::fflush(stdout) != 0 && output_error == 0) output_error = errno != 0 ? errno : EIO;
  return output_error;
}

void flush_or_stop() {
  if (flush_output() != 0) throw OutputLost{};
}

std::string json_text(const nlohmann::ordered_json& json) {
  using Json = nlohmann::ordered_json;
  // Names may hold bytes that are not UTF-8.
  const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string safe;
  safe.reserve(text.size());
  for_characters(text, [&](std::string_view character, bool steers) {
    if (!steers) {
      safe += character;
      return;
    }
    const auto bits = [&](size_t i) { return static_cast<uint8_t>(character[i]) & 0x3Fu; };
    uint32_t code = static_cast<uint8_t>(character[0]);  // all of these are below U+FFFF
    if (character.size() == 2) code = (code & 0x1Fu) << 6 | bits(1);
    if (character.size() == 3) code = (code & 0x0Fu) << 12 | bits(1) << 6 | bits(2);
    safe += fmt::format("\\u{:04x}", code);
  });
  return safe;
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
  const auto whole = std::llround(seconds);
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
