// UTF-8 helpers for untrusted text (tensor names, settings and notes that end up in files, on pages
// and on terminals), and the layout of text in columns.
#ifndef HEADROOM_SRC_RECORD_TEXT_H_
#define HEADROOM_SRC_RECORD_TEXT_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace headroom::internal {

/// U+FFFD, which replaces invalid bytes.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

/// Length in bytes of the UTF-8 character at the front of `text`; 0 if it is invalid. `text` must
/// not be empty.
size_t character_length(std::string_view text);

/// Whether a UTF-8 character controls the display of the text around it: control characters, line
/// separators and characters that change the direction of text.
bool is_control_character(std::string_view character);

/// Calls use(character, valid) for every UTF-8 character of `text`; invalid bytes one by one.
template <typename Use>
void for_each_character(std::string_view text, const Use& use) {
  while (!text.empty()) {
    const size_t length = character_length(text);
    const std::string_view character = text.substr(0, std::max<size_t>(1, length));
    use(character, length != 0);
    text.remove_prefix(character.size());
  }
}

/// The text with every invalid byte replaced.
std::string valid_utf8(std::string_view text);

/// Makes untrusted text safe for a terminal: text from files must not clear the screen, change the
/// window title or reverse the direction of text. Control characters other than newlines and tabs,
/// and invalid UTF-8, become '?'.
std::string printable(std::string_view text);
/// The same on one line: newlines and tabs become '?', too.
std::string printable_line(std::string_view text);

/// The names as a list of strings in Python: ["a", "b"]. Whatever a name contains remains text.
std::string quoted_list(const std::vector<std::string>& names);

/// The width of UTF-8 text in columns, assuming one per character.
size_t column_count(std::string_view text);

/// The length of the longest common prefix of all names that ends with a dot.
size_t common_prefix(const std::vector<std::string>& names);

/// Shortens or pads a name to `width` columns. A name that is too long loses the `common` first
/// bytes, then its middle: names usually differ near their beginning or end.
std::string fitted(std::string name, size_t width, size_t common);

/// The sentence in lines of at most `width` columns, each with a newline. Lines after the first
/// begin with `indent`.
std::string wrapped(std::string_view sentence, size_t width, std::string_view indent = "");

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_TEXT_H_
