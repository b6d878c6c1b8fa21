#include "cli/output.h"

#include <fmt/format.h>
#include <headroom/error.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <nlohmann/json.hpp>

namespace headroom::cli {
namespace {

int output_error = 0;  // errno of the first failed write to standard output

void write_error(std::string_view text) noexcept {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

void print_error(const std::string& text) noexcept {
  try {
    std::string line = printable(text);
    const size_t end = line.ends_with('\n') ? line.size() - 1 : line.size();
    std::replace(line.begin(), line.begin() + static_cast<std::ptrdiff_t>(end), '\n', ' ');
    constexpr std::string_view kProgram = "headroom:";
    if (line.starts_with(kProgram) && wants_colour(STDERR_FILENO)) {
      line = "\x1b[1;31m" + std::string(kProgram) + "\x1b[0m" + line.substr(kProgram.size());
    }
    write_error(line);
  } catch (const std::bad_alloc&) {
    write_error("headroom: There is not enough memory to report an error.\n");
  }
}

void print_left_out(const std::vector<std::string>& reasons) {
  for (const std::string& why : reasons) {
    print_error(fmt::format("headroom: {} It is left out.\n", why));
  }
}

void redraw(const std::string& line) noexcept {
  try {
    write_error("\r" + printable(line) + "\x1b[K");
  } catch (const std::bad_alloc&) {  // the next update may succeed
  }
}

void print_text(const std::string& text) noexcept {
  try {
    const std::string safe = printable(text);
    if (std::fwrite(safe.data(), 1, safe.size(), stdout) == safe.size()) return;
    if (output_error == 0) output_error = errno != 0 ? errno : EIO;
  } catch (const std::bad_alloc&) {
    output_error = ENOMEM;
  }
}

std::string shell_word(const std::string& word) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("_-./+:,=@%").find(static_cast<char>(c)) != std::string_view::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

bool wants_colour(int descriptor) {
  const char* const no_colour = std::getenv("NO_COLOR");
  const char* const terminal = std::getenv("TERM");
  if (no_colour != nullptr && *no_colour != '\0') return false;
  return isatty(descriptor) != 0 && terminal != nullptr && std::string_view(terminal) != "dumb";
}

void print_bold(const std::string& text) noexcept {
  if (!wants_colour(STDOUT_FILENO)) return print_text(text);
  std::fputs("\x1b[1m", stdout);
  print_text(text);
  std::fputs("\x1b[0m", stdout);
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
  // Names may contain invalid UTF-8, which dump() replaces.
  const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string safe;
  safe.reserve(text.size());
  internal::for_each_character(text, [&](std::string_view character, bool) {
    if (!internal::is_control_character(character)) {
      safe += character;
      return;
    }
    const auto bits = [&](size_t i) { return static_cast<uint8_t>(character[i]) & 0x3Fu; };
    uint32_t code = static_cast<uint8_t>(character[0]);  // control characters are below U+FFFF
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
