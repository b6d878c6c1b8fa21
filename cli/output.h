// What several commands need to write for people.
#ifndef HEADROOM_CLI_OUTPUT_H_
#define HEADROOM_CLI_OUTPUT_H_

#include <fmt/format.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace headroom::cli {

/// The text as a terminal may be sent it: what comes out of files must not clear the screen, change
/// the terminal's title or turn the text around. Control characters, those that turn the direction
/// of text, and bytes that are not UTF-8 become '?'; line ends and tabs stay.
std::string shown(std::string_view text);

/// Writes a sentence to standard error, as shown(), on one line whatever it quotes. Never throws:
/// if standard error is closed or full, the text is lost.
void tell(const std::string& text) noexcept;

/// Draws a line of standard error's terminal anew, as shown().
void redraw(const std::string& line) noexcept;

/// Writes to standard output, as shown(). Never throws: what is lost is known to flush_output().
void print_text(const std::string& text) noexcept;
template <typename... Values>
void print(fmt::format_string<Values...> format, Values&&... values) {
  print_text(fmt::format(format, std::forward<Values>(values)...));
}

/// Hands what was printed to the system; the error number if any of it, ever, was lost, else 0.
int flush_output() noexcept;

/// For commands that only print, between two results that take long: ends the command if what it
/// printed is lost, such as to a reader that has gone.
struct OutputLost {};
void flush_or_stop();

/// JSON on one line. All that shown() would replace is escaped, so that nothing of it is lost.
std::string json_text(const nlohmann::ordered_json& json);

/// "2^16", or the number itself if it is no power of two.
std::string scale_text(float scale);
/// "65536", "0.25", "1e+30": whole numbers in full, others in as few digits as tell floats apart.
std::string scale_number(double scale);
/// A whole number without a fraction, as people write scales.
nlohmann::ordered_json scale_json(float scale);

/// NaN without the sign that it happens to have, which would be printed.
double plain_nan(double value);

/// "42s", "3m05s", "2h10m".
std::string duration(double seconds);

/// Columns of the terminal behind a descriptor; 80 if it is none.
int terminal_width(int descriptor);

/// "[####......] ", as wide as `room`; nothing if that is too little for a bar.
std::string progress_bar(int room, double share);

/// Throws Error(kInvalidArgument).
[[noreturn]] void refuse(const std::string& sentence);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_OUTPUT_H_
