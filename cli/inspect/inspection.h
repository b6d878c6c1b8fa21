// What `headroom inspect` found, before it is written as a table, JSON or a page.
#ifndef HEADROOM_CLI_INSPECT_INSPECTION_H_
#define HEADROOM_CLI_INSPECT_INSPECTION_H_

#include <headroom/inspect.h>

#include <optional>
#include <string>
#include <vector>

namespace headroom::cli {

struct InspectOptions {
  std::vector<std::string> files;
  std::vector<std::string> patterns;  // of tensor names; none: all
  std::string format = "fp16";
  std::optional<float> scale;
  double lose = 1e-3;
  std::string as;  // "bf16": what 16 bits that are no floats are
  bool all = false;
  bool json = false;
  std::string html;
};

/// One tensor, or the sum of all.
struct Row {
  size_t file = 0;  // index into Inspection::files
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  Magnitudes magnitudes;
  Outcome exact;  // at options.scale, if that is no power of two
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

  /// The scale that tensors are compared at: the one asked for, or else the advised one.
  float scale() const { return options.scale.value_or(advice.scale); }
  Outcome outcome(const Row& row) const;  // at scale()
  /// "name", or "file:name" where there are several files.
  std::string label(const Row& row) const;
  /// Indexes into rows, those that lose most at scale() first.
  std::vector<size_t> worst_first() const;
  /// The powers of two between which something changes, and one more at either end.
  std::pair<int, int> powers() const;
};

/// The exponent if the scale is a power of two.
std::optional<int> exact_power(float scale);

/// part / whole, 0 if there is nothing.
double share(int64_t part, int64_t whole);
/// "0", "<1e-4 %", "0.0012 %", "12.34 %": eight characters at most.
std::string percent(int64_t part, int64_t whole);
/// "1,234,567".
std::string grouped(int64_t number);

/// What the advised scale is: "recommended", or what it is where none fits.
std::string advised(const Inspection& inspection);
/// One sentence on the scales that lose no more than was allowed.
std::string range_sentence(const Inspection& inspection);
/// Sentences on what was seen beside the counts: inf and NaN, tensors left out.
std::vector<std::string> notes(const Inspection& inspection);

/// Reads every file. Shows progress on a terminal.
Inspection scan(const InspectOptions& options);

void print_table(const Inspection& inspection);
void print_json(const Inspection& inspection);
std::string html_page(const Inspection& inspection);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_INSPECT_INSPECTION_H_
