// Recorded traces: one step a line, `0` or `1`, or a JSON object; or the history of a run.
#ifndef HEADROOM_CLI_TRACE_H_
#define HEADROOM_CLI_TRACE_H_

#include <headroom/policy.h>

#include <cstdint>
#include <istream>
#include <string>
#include <utility>
#include <vector>

namespace headroom::cli {

/// Exponents and counts: gradients with 2^e <= |x| < 2^(e+1).
using Log2Counts = std::vector<std::pair<int, int64_t>>;

/// What is known of one step. Everything about gradients is unscaled.
struct TraceStep {
  bool overflow = false;     // at any scale
  double overflow_at = 0.0;  // the smallest scale at which backward overflows; 0: none
  double amax = 0.0;         // largest magnitude; 0 if not known
  Log2Counts log2;           // mostly empty

  /// What a scaler sees of the step at a scale, in FP16.
  StepSeen at(float scale) const;

  int64_t values() const;              // in the histogram
  int64_t lost_at(float scale) const;  // of which FP16 has only 0
};

/// The largest number if the sum is beyond it, which only traces that lie come to.
int64_t saturating_sum(int64_t a, int64_t b);

/// Blank lines and lines that start with # are left out, and so is the last line of a history if it
/// is cut off, which sets `cut`. A line that is neither throws Error(kInvalidArgument) with `name`
/// and the line's number.
std::vector<TraceStep> read_trace(std::istream& in, const std::string& name, bool* cut = nullptr);

/// The same from a file, or from standard input for "-".
std::vector<TraceStep> read_trace_file(const std::string& path, bool* cut = nullptr);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRACE_H_
