// UTF-8 helpers for untrusted text: tensor names, settings and notes that end up in files, on pages
// and on terminals.
#ifndef HEADROOM_SRC_RECORD_TEXT_H_
#define HEADROOM_SRC_RECORD_TEXT_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

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

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_TEXT_H_
