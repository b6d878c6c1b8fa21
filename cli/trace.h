// Recorded traces: one step a line, `0` or `1`, or a JSON object with `overflow`; or the history of
// a run.
#ifndef HEADROOM_CLI_TRACE_H_
#define HEADROOM_CLI_TRACE_H_

#include <istream>
#include <string>
#include <vector>

namespace headroom::cli {

/// Whether each step overflowed. Blank lines and lines that start with # are left out. A line that
/// is neither throws Error(kInvalidArgument) with `name` and the line's number.
std::vector<bool> read_trace(std::istream& in, const std::string& name);

/// The same from a file, or from standard input for "-".
std::vector<bool> read_trace_file(const std::string& path);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRACE_H_
