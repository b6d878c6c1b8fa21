// Recorded traces: one step per line as `0`, `1` or a JSON object, or the history of a run.
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

/// One step of a trace. All gradients are unscaled.
struct TraceStep {
  bool overflow = false;     // at every scale
  double overflow_at = 0.0;  // the smallest scale at which backward overflows; 0: none
  double amax = 0.0;         // largest magnitude; 0 if unknown
  Log2Counts log2;           // histogram; empty for most steps

  /// The measurement of a scaler at this scale, in FP16.
  StepSeen at(float scale) const;

  int64_t values() const;              // in the histogram
  int64_t lost_at(float scale) const;  // of these, how many become 0 in FP16
};

/// a + b, or the largest int64_t if the sum overflows, which only happens for invalid traces.
int64_t saturating_sum(int64_t a, int64_t b);

/// Reads a trace. Ignores blank lines, lines that start with #, and an incomplete last line of a
/// history, for which it sets `cut`. Throws Error(kInvalidArgument) with `name` and the line number
/// for any other line that is not a step.
std::vector<TraceStep> read_trace(std::istream& in, const std::string& name, bool* cut = nullptr);

/// Reads a trace from a file, or from standard input for "-".
std::vector<TraceStep> read_trace_file(const std::string& path, bool* cut = nullptr);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRACE_H_
