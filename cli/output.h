// What several commands need to write for people.
#ifndef HEADROOM_CLI_OUTPUT_H_
#define HEADROOM_CLI_OUTPUT_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace headroom::cli {

/// Writes to standard error. Never throws: where nobody can be told, the work goes on.
void tell(const std::string& text) noexcept;

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
