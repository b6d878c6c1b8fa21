#include "record/text.h"

#include <cstdint>

namespace headroom::internal {

size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  const size_t length = first < 0x80   ? 1
                        : first < 0xC2 ? 0  // a continuation byte, or an overlong encoding
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                                       : 4;
  if (length == 0 || first > 0xF4 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong encodings, UTF-16 surrogates, and code points above U+10FFFF.
  const bool invalid = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
                       (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F);
  return invalid ? 0 : length;
}

bool is_control_character(std::string_view character) {
  // Comparing the bytes orders UTF-8 characters of the same length by code point.
  const auto within = [&](std::string_view first, std::string_view last) {
    return character >= first && character <= last && character.size() == first.size();
  };
  return character < " " || character == "\x7f" || within("\u0080", "\u009f") ||
         character == "\u061c" || within("\u200e", "\u200f") || within("\u2028", "\u202e") ||
         within("\u2066", "\u2069");
}

std::string valid_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for_each_character(text, [&](std::string_view character, bool valid) {
    result += valid ? character : kReplacementCharacter;
  });
  return result;
}

}  // namespace headroom::internal
