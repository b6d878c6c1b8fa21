#include "record/text.h"

#include <cstdint>

namespace headroom::internal {

size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  const size_t length = first < 0x80   ? 1
                        : first < 0xC2 ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                                       : 4;
  if (length == 0 || first > 0xF4 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Longer than need be, half of a UTF-16 pair, or beyond Unicode.
  const bool wrong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
                     (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F);
  return wrong ? 0 : length;
}

bool steers_text(std::string_view character) {
  const auto within = [&](std::string_view first, std::string_view last) {
    return character >= first && character <= last && character.size() == first.size();
  };
  return character < " " || character == "\x7f" || within("\u0080", "\u009f") ||
         character == "\u061c" || within("\u200e", "\u200f") || within("\u2028", "\u202e") ||
         within("\u2066", "\u2069");
}

std::string valid_utf8(std::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    const size_t length = character_length(text);
    valid += length == 0 ? kNoText : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return valid;
}

}  // namespace headroom::internal
