#ifndef HEADROOM_SRC_RECORD_TEXT_H_
#define HEADROOM_SRC_RECORD_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace headroom::internal {

/// What stands for bytes that are no text: U+FFFD.
inline constexpr std::string_view kNoText = "\xEF\xBF\xBD";

/// Length of the UTF-8 character at the front of `text`; 0 if there is none. Not for empty text.
size_t character_length(std::string_view text);

/// Whether a UTF-8 character steers the text around it instead of being shown: control characters,
/// and those that break lines or turn the direction of text.
bool steers_text(std::string_view character);

/// The text with every byte that is not UTF-8 replaced.
std::string valid_utf8(std::string_view text);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_TEXT_H_
