// Output for people: sanitised text, numbers, progress bars.
#ifndef HEADROOM_CLI_OUTPUT_H_
#define HEADROOM_CLI_OUTPUT_H_

#include <fmt/format.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "record/text.h"

namespace headroom::cli {

using internal::printable;

/// Writes a message to standard error, made printable() and put on one line. Never throws: if
/// standard error is closed or full, the text is lost.
void print_error(const std::string& text) noexcept;

/// Reports runs or checkpoints that were skipped, with the reasons.
void print_left_out(const std::vector<std::string>& reasons);

/// Overwrites the current line of the terminal at standard error, made printable().
void redraw(const std::string& line) noexcept;

/// Writes to standard output, made printable(). Never throws: flush_output() reports a failure.
void print_text(const std::string& text) noexcept;
template <typename... Values>
void print(fmt::format_string<Values...> format, Values&&... values) {
  print_text(fmt::format(format, std::forward<Values>(values)...));
}

/// Flushes standard output. Returns 0, or the errno of the first write that failed since the start.
int flush_output() noexcept;

/// flush_output() for commands that compute for long between two results: throws OutputLost if
/// output was lost, for example because the reader of a pipe has exited. run_program() catches it.
struct OutputLost {};
void flush_or_stop();

/// JSON on one line. Characters that printable() would replace are escaped, so that none is lost.
std::string json_text(const nlohmann::ordered_json& json);

/// "2^16", or the number itself if it is not a power of two.
std::string scale_text(float scale);
/// "65536", "0.25", "1e+30": integers in full, others with the fewest digits that identify the
/// float.
std::string scale_number(double scale);
/// An integer if the scale is one, so that it is printed without a fraction.
nlohmann::ordered_json scale_json(float scale);

/// Clears the sign of NaN, which would be printed as "-nan".
double plain_nan(double value);

/// "42s", "3m05s", "2h10m".
std::string duration(double seconds);

/// A word of a shell command line, quoted if necessary.
std::string shell_word(const std::string& word);

/// Whether to colour what goes to a file descriptor: it is a terminal, and NO_COLOR is not set.
bool wants_colour(int descriptor);

/// print_text() in bold, if standard output is coloured.
void print_bold(const std::string& text) noexcept;

/// Columns of the terminal at a file descriptor; 80 if it is not a terminal.
int terminal_width(int descriptor);

/// "[####......] ", at most `room` columns wide; empty if that is too narrow for a bar.
std::string progress_bar(int room, double share);

/// Throws Error(kInvalidArgument).
[[noreturn]] void refuse(const std::string& sentence);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_OUTPUT_H_
