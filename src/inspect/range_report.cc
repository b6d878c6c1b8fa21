// RangeReport: which operation left FP16's range first, what is close to it, and what to do.
#include <headroom/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/element.h"
#include "record/text.h"

namespace headroom {
namespace {

using internal::kLargestF16;
constexpr double kLargestBF16 = 0x1.FEp127;
constexpr double kBertMask = 10000.0;

// Beside inf that come from overflow there are finite elements close to the limit. Inf beside
// ordinary elements only come from a pole: 1/0, log(0), the backward of sqrt(0).
constexpr double kOverflowEvidence = 5.0;  // doublings

// Advice about underflow is given from this share of the nonzero elements of all f16 gradients on.
constexpr double kManyLost = 0.05;

std::string printed(const char* format, double value) {
  char text[48];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string percent(int64_t part, int64_t whole) {
  if (part == 0 || whole == 0) return "0";
  const double share = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  return share < 0.1 ? "<0.1" : printed("%.1f", share);
}

std::string counts(const RangeStats& stats) {
  return std::to_string(stats.inf()) + " inf, " + std::to_string(stats.nan) + " nan";
}

bool is_source(const RangeRow& row) { return row.source != RangeSource::kOperation; }

/// Recognises what a program has put into a tensor on purpose, to exclude elements from a softmax
/// or a maximum: -inf, the lowest number of a type or BERT's -10000, or any inf in a constant. It
/// may be computed, as (1 - mask) * -10000, and added to scores. Rows are added in their order.
class Masks {
 public:
  explicit Masks(const std::vector<RangeRow>& rows) : rows_(rows) {
    for (const RangeRow& row : rows) {
      written_.push_back(is_written(row));
      masks_.push_back(is_mask(row));
    }
  }
  std::vector<bool> take() { return std::move(masks_); }

 private:
  // Whether a tensor holds data and constants, or only casts, products and sums of those: no
  // parameter has a part in it.
  bool is_written(const RangeRow& row) const {
    static const std::set<std::string> kNames = {
        "add",  "bfloat16", "double",  "float",    "half", "mul",  "multiply", "neg",
        "rsub", "sub",      "to_copy", "_to_copy", "to",   "type", "type_as"};
    if (row.source != RangeSource::kOperation) return row.source != RangeSource::kParameter;
    return kNames.count(row.operation) > 0 &&
           std::all_of(row.inputs.begin(), row.inputs.end(),
                       [&](int64_t input) { return written_[static_cast<size_t>(input)]; });
  }

  bool is_mask(const RangeRow& row) const {
    const RangeStats& stats = row.stats;
    const bool constant = row.source == RangeSource::kConstant;
    if (row.direction == RangeDirection::kBackward || stats.nan > 0) return false;
    if (constant && stats.inf() > 0) return true;
    if (row.source == RangeSource::kParameter || stats.positive_inf > 0) return false;
    const bool lowest = stats.negative_inf > 0 || stats.amax > 0.99 * kLargestF16;
    const bool exact =
        stats.amax == kLargestF16 || stats.amax == kBertMask || stats.amax > 0.99 * kLargestBF16;
    if (row.source != RangeSource::kOperation) return lowest || exact;
    return (written_.back() && exact) || is_masked(row, lowest);
  }

  // Whether a result has its largest elements from a mask among its inputs.
  bool is_masked(const RangeRow& row, bool lowest) const {
    double mask = 0.0, other = 0.0;
    bool any = false;
    for (const int64_t input : row.inputs) {
      const auto i = static_cast<size_t>(input);
      double& largest = masks_[i] ? mask : other;
      largest = std::max(largest, rows_[i].stats.amax);
      any = any || masks_[i];
    }
    const double amax = row.stats.amax;
    return any && (lowest || (amax >= 0.5 * mask && amax <= 1.01 * (mask + other)));
  }

  const std::vector<RangeRow>& rows_;
  std::vector<bool> written_, masks_;
};

// How to keep modules in FP32. keep_fp32() is for FP32 parameters and refuses others.
std::string keep_in_fp32(const std::vector<RangeRow>& rows,
                         const std::vector<std::string>& modules) {
  std::vector<std::string> wide, narrow;
  for (const std::string& module : modules) {
    const bool is_16_bit = std::any_of(rows.begin(), rows.end(), [&](const RangeRow& row) {
      return row.source == RangeSource::kParameter && size_of(row.dtype) == 2 &&
             (row.module + ".").rfind(module + ".", 0) == 0;
    });
    (is_16_bit ? narrow : wide).push_back(module);
  }
  std::string text;
  if (!wide.empty()) text = "Keep in FP32: keep_fp32(model, " + internal::quoted_list(wide) + ").";
  if (narrow.empty()) return text;
  return text + (text.empty() ? "" : " ") + "The parameters of " + internal::quoted_list(narrow) +
         " are 16-bit, which keep_fp32 refuses: train FP32 parameters under autocast, or cast the "
         "module and its inputs to FP32.";
}

// Gradients of FP32 parameters are computed in FP16 under autocast, and cast afterwards.
bool overflowed(const RangeRow& row) {
  const double bits = row.stats.headroom_bits();
  return row.stats.inf() > 0 && bits >= 0.0 && bits <= kOverflowEvidence;
}

}  // namespace

double RangeStats::headroom_bits() const { return std::log2(kLargestF16 / amax); }

std::string RangeRow::label() const {
  const std::string in = module.empty() ? "" : module + ": ";
  const std::string path = module.empty() ? tensor : module + "." + tensor;
  if (source == RangeSource::kInput) return "input " + tensor;
  if (source == RangeSource::kParameter) return "parameter " + path;
  if (direction == RangeDirection::kForward) return in + operation;
  if (operation.empty()) return "gradient of " + tensor;
  return in + "backward of " + operation;
}

RangeReport::RangeReport(std::vector<RangeRow> rows) : rows_(std::move(rows)) {
  for (size_t i = 0; i < rows_.size(); ++i) {
    for (const int64_t input : rows_[i].inputs) {
      internal::require(input >= 0 && input < static_cast<int64_t>(i), ErrorCode::kInvalidArgument,
                        [&] {
                          return "Row " + std::to_string(i) + " is computed from row " +
                                 std::to_string(input) + ", which is not before it.";
                        });
    }
  }
  masks_ = Masks(rows_).take();
  std::vector<bool> bad(rows_.size());
  for (size_t i = 0; i < rows_.size(); ++i) bad[i] = !rows_[i].stats.finite() && !masks_[i];
  // A bad element of an input or a parameter matters once a result is bad, too: a row of an
  // embedding that is never looked up does no harm.
  std::set<int64_t> harmful;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (bad[i]) harmful.insert(rows_[i].inputs.begin(), rows_[i].inputs.end());
  }
  for (size_t i = 0; i < rows_.size() && first_bad_ < 0; ++i) {
    const auto row = static_cast<int64_t>(i);
    if (bad[i] && (!is_source(rows_[i]) || harmful.count(row) > 0)) first_bad_ = row;
  }
}

bool RangeReport::inputs_finite(int64_t row) const {
  const auto& inputs = rows_.at(static_cast<size_t>(row)).inputs;
  return std::all_of(inputs.begin(), inputs.end(), [&](int64_t input) {
    return rows_[static_cast<size_t>(input)].stats.finite();
  });
}

bool RangeReport::only_f16() const {
  return std::any_of(rows_.begin(), rows_.end(),
                     [](const RangeRow& row) { return row.dtype == DType::kF16; });
}

std::vector<int64_t> RangeReport::near_overflow(double bits) const {
  std::vector<int64_t> near;
  const bool f16_alone = only_f16();
  for (size_t i = 0; i < rows_.size(); ++i) {
    const RangeRow& row = rows_[i];
    if (is_source(row) || masks_[i] || (f16_alone && row.dtype != DType::kF16)) continue;
    if (row.stats.headroom_bits() <= bits) near.push_back(static_cast<int64_t>(i));
  }
  std::stable_sort(near.begin(), near.end(), [&](int64_t a, int64_t b) {
    return rows_[static_cast<size_t>(a)].stats.amax > rows_[static_cast<size_t>(b)].stats.amax;
  });
  return near;
}

std::vector<std::string> RangeReport::islands() const {
  std::vector<int64_t> rows = near_overflow();
  const bool f16_bad = first_bad_ >= 0 &&
                       rows_[static_cast<size_t>(first_bad_)].dtype == DType::kF16 &&
                       inputs_finite(first_bad_);
  if (f16_bad) rows.push_back(first_bad_);
  std::sort(rows.begin(), rows.end());
  std::vector<std::string> modules;
  for (const int64_t i : rows) {
    const RangeRow& row = rows_[static_cast<size_t>(i)];
    if (row.direction == RangeDirection::kBackward || is_source(row) || row.module.empty())
      continue;
    if (std::find(modules.begin(), modules.end(), row.module) == modules.end()) {
      modules.push_back(row.module);
    }
  }
  // A module in FP32 includes its children.
  const std::vector<std::string> all = modules;
  const auto has_parent = [&](const std::string& name) {
    return std::any_of(all.begin(), all.end(),
                       [&](const std::string& other) { return name.rfind(other + ".", 0) == 0; });
  };
  modules.erase(std::remove_if(modules.begin(), modules.end(), has_parent), modules.end());
  return modules;
}

// One or two sentences about the first bad row.
std::string RangeReport::advice_for(int64_t index) const {
  const RangeRow& row = rows_[static_cast<size_t>(index)];
  const std::string what = row.label() + " (" + counts(row.stats) + ")";
  if (row.source == RangeSource::kInput) {
    return what + ": the data are bad; skip or repair this batch. No loss scale cures it.";
  }
  if (row.source == RangeSource::kParameter) {
    return what + ": the weights are damaged; restore a checkpoint. No loss scale cures it.";
  }
  if (!inputs_finite(index)) {
    std::string causes;
    for (const int64_t input : row.inputs) {
      const RangeRow& from = rows_[static_cast<size_t>(input)];
      if (!from.stats.finite()) causes += (causes.empty() ? "" : "; ") + from.label();
    }
    return what + " is computed from inf (" + causes +
           "): inf - inf, 0 x inf, or a softmax with every element masked. No loss scale cures it.";
  }
  if (row.direction == RangeDirection::kBackward) {
    if (overflowed(row)) {
      return what +
             ": the gradient overflows FP16. A lower loss scale cures it; a dynamic scale "
             "finds one by itself.";
    }
    const std::string pole =
        "No loss scale cures the derivative of sqrt, log or division at 0: add an epsilon or clamp "
        "the argument.";
    if (row.stats.inf() == 0) return what + ": finite gradients became NaN. " + pole;
    return what +
           ": finite gradients became inf. If they overflow FP16, a lower loss scale cures it. " +
           pole;
  }
  if (row.dtype == DType::kF16 && row.stats.nan == 0) {
    const std::string guard =
        overflowed(row) ? "" : " If it is inf in FP32, too, guard the argument.";
    return what + " overflows FP16 in forward: no loss scale cures it. " +
           (row.module.empty() ? "Cast its arguments to FP32."
                               : keep_in_fp32(rows_, {row.module})) +
           guard;
  }
  return what +
         ": finite inputs gave inf or NaN (division by 0, log or exp out of range, a sum that "
         "overflows). No loss scale cures it: guard the argument, or compute it in FP32.";
}

std::vector<std::string> RangeReport::advice() const {
  std::vector<std::string> sentences;
  if (first_bad_ >= 0) sentences.push_back("First bad result: " + advice_for(first_bad_));
  const std::vector<std::string> modules = islands();
  if (first_bad_ < 0 && !modules.empty()) {
    sentences.push_back(
        "Forward results are within 3 doublings of FP16's limit; no loss scale moves them. " +
        keep_in_fp32(rows_, modules));
  }
  int64_t small = 0, nonzero = 0;
  double room = HUGE_VAL;
  for (const RangeRow& row : rows_) {
    if (row.direction != RangeDirection::kBackward || row.dtype != DType::kF16) continue;
    small += row.stats.subnormal;
    nonzero += row.stats.count - row.stats.zeros;
    room = std::min(room, row.stats.headroom_bits());
  }
  if (first_bad_ < 0 && nonzero > 0 &&
      static_cast<double>(small) > kManyLost * static_cast<double>(nonzero)) {
    const std::string lost =
        percent(small, nonzero) + " % of the nonzero FP16 gradients are subnormal";
    const double doublings = std::floor(room - 3.0);
    sentences.push_back(
        doublings >= 1.0 ? lost + "; the loss scale can be doubled " + printed("%.0f", doublings) +
                               " times, 3 doublings left to overflow."
                         : lost + ", and the largest gradient leaves no room for a larger scale.");
  }
  return sentences;
}

std::string RangeReport::to_string() const {
  std::vector<int64_t> shown = near_overflow();
  if (first_bad_ >= 0) {
    std::erase(shown, first_bad_);
    shown.insert(shown.begin(), first_bad_);
  }
  std::string text = std::to_string(rows_.size()) + " tensors measured\n";
  if (!shown.empty()) {
    text += "     row  type      amax    bits  zero %  subn. %       inf       nan  operation\n";
  }
  constexpr size_t kMostRows = 12;
  for (size_t i = 0; i < shown.size(); ++i) {
    if (i == kMostRows) {
      text += "     ... " + std::to_string(shown.size() - kMostRows) + " more\n";
      break;
    }
    const RangeRow& row = rows_[static_cast<size_t>(shown[i])];
    char line[160];
    std::snprintf(line, sizeof(line), "%8lld  %-5s%9.4g%8.1f%8s%9s%10lld%10lld  ",
                  static_cast<long long>(shown[i]), headroom::to_string(row.dtype), row.stats.amax,
                  row.stats.headroom_bits(), percent(row.stats.zeros, row.stats.count).c_str(),
                  percent(row.stats.subnormal, row.stats.count).c_str(),
                  static_cast<long long>(row.stats.inf()), static_cast<long long>(row.stats.nan));
    text += line + row.label() + "\n";
  }
  const std::vector<std::string> sentences = advice();
  for (const std::string& sentence : sentences) text += sentence + "\n";
  if (sentences.empty() && shown.empty()) {
    text += "All results are finite and at least 3 doublings below FP16's limit.\n";
  }
  text.pop_back();  // the last line's end
  return text;
}

}  // namespace headroom
