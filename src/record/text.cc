#include "record/text.h"

#include <cstdint>
#include <cstdio>

namespace headroom::internal {
namespace {

/// The byte offset of the character number `index`; the size of the text if it has fewer.
size_t offset_of(std::string_view text, size_t index) {
  size_t at = 0;
  for (; at < text.size(); ++at) {
    if ((text[at] & 0xC0) != 0x80 && index-- == 0) break;
  }
  return at;
}

}  // namespace

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

std::string printable(std::string_view text) {
  std::string safe;
  safe.reserve(text.size());
  for_each_character(text, [&](std::string_view character, bool valid) {
    const bool whitespace = character == "\n" || character == "\t";
    const bool shown = valid && (whitespace || !is_control_character(character));
    safe += shown ? character : "?";
  });
  return safe;
}

std::string printable_line(std::string_view text) {
  std::string line = printable(text);
  for (char& c : line) c = c == '\n' || c == '\t' ? '?' : c;
  return line;
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) {
    text += text.size() > 1 ? ", \"" : "\"";
    for (const char c : name) {
      if (c == '"' || c == '\\') {
        text += {'\\', c};
      } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
        char code[8];
        std::snprintf(code, sizeof code, "\\x%02x", c);
        text += code;
      } else {
        text += c;
      }
    }
    text += '"';
  }
  return text + "]";
}

size_t column_count(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

size_t common_prefix(const std::vector<std::string>& names) {
  size_t common = names.empty() ? 0 : names[0].size();
  for (const std::string& name : names) {
    common = std::min(common, name.size());
    common = static_cast<size_t>(std::mismatch(name.begin(),
                                               name.begin() + static_cast<std::ptrdiff_t>(common),
                                               names[0].begin())
                                     .first -
                                 name.begin());
  }
  while (common > 0 && names[0][common - 1] != '.') --common;
  return common;
}

std::string fitted(std::string name, size_t width, size_t common) {
  if (column_count(name) > width && common > 2) name.replace(0, common, "..");
  if (column_count(name) > width) {
    const size_t head = (width - 2) / 3;
    const size_t from = offset_of(name, head);
    const size_t to = offset_of(name, column_count(name) - (width - 2 - head));
    name.replace(from, to - from, "..");
  }
  return name + std::string(width - column_count(name), ' ');
}

std::string wrapped(std::string_view sentence, size_t width, std::string_view indent) {
  std::string text;
  std::string line;
  while (!sentence.empty()) {
    size_t end = std::min(sentence.find(' '), sentence.size());
    // A number and its percent sign stay together.
    if (sentence.substr(end).starts_with(" %"))
      end = std::min(sentence.find(' ', end + 1), sentence.size());
    const std::string_view word = sentence.substr(0, end);
    sentence.remove_prefix(std::min(end + 1, sentence.size()));
    const bool begun = !line.empty() && line != indent;
    if (begun && column_count(line) + 1 + column_count(word) > width) {
      text += line + "\n";
      line = indent;
    }
    if (!line.empty() && line != indent) line += " ";
    line += word;
  }
  return text + line + "\n";
}

}  // namespace headroom::internal
