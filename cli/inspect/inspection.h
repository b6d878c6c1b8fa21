// The result of `headroom inspect`, before it is printed as a table, JSON or an HTML page.
#ifndef HEADROOM_CLI_INSPECT_INSPECTION_H_
#define HEADROOM_CLI_INSPECT_INSPECTION_H_

#include <headroom/inspect.h>

#include <optional>
#include <string>
#include <vector>

#include "inspect/numbers.h"

namespace headroom::cli {

struct InspectOptions {
  std::vector<std::string> files;
  std::vector<std::string> patterns;  // of tensor names; empty: all tensors
  std::string format = "fp16";
  std::optional<float> scale;
  double lose = 1e-3;
  bool weights = false;  // see inspect_weights()
  std::string as;        // "bf16": interpret 16-bit integers as bf16
  bool all = false;
  bool json = false;
  std::string html;
};

/// One tensor, or the total of all.
struct Row {
  size_t file = 0;  // index into Inspection::files
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  Magnitudes magnitudes;
  Outcome exact;  // at options.scale, if that is not a power of two
};

struct FileInfo {
  std::string path;
  std::vector<std::pair<std::string, std::string>> left_out;  // name, type
};

struct Inspection {
  InspectOptions options;
  Format format = Format::kFP16;
  std::vector<FileInfo> files;
  std::vector<Row> rows;  // in the order of the files
  Row total;
  ScaleAdvice advice;

  /// The scale at which tensors are compared: --scale, or else the recommended one.
  float scale() const { return options.scale.value_or(advice.scale); }
  Outcome outcome(const Row& row) const;  // at scale()
  /// "name", or "file:name" where there are several files.
  std::string label(const Row& row) const;
  /// Indices into `rows`, ordered by what the tensors lose at scale(), the worst first.
  std::vector<size_t> worst_first() const;
  /// The range of powers of two within which outcomes change, extended by one at either end.
  std::pair<int, int> powers() const;
};

/// The exponent of a scale that is a power of two; otherwise nothing.
std::optional<int> exact_power(float scale);

using internal::grouped;
using internal::percent;
using internal::share;

/// "recommended", or what the scale in the advice is if none fits.
std::string advice_label(const Inspection& inspection);
/// A sentence on the scales that lose no more than --lose allows.
std::string range_sentence(const Inspection& inspection);
/// Sentences on inf and NaN, tensors that were left out, and other findings.
std::vector<std::string> notes(const Inspection& inspection);

/// Reads every file. Shows progress on a terminal.
Inspection scan(const InspectOptions& options);

void print_table(const Inspection& inspection);
void print_json(const Inspection& inspection);
std::string html_page(const Inspection& inspection);

/// `inspect --weights`: whether a checkpoint is safe in FP16. Returns the exit status.
int inspect_weights(const InspectOptions& options);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_INSPECT_INSPECTION_H_
