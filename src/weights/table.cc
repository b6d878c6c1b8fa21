#include <headroom/weights.h>

#include <algorithm>
#include <set>

#include "inspect/numbers.h"
#include "record/text.h"

namespace headroom {
namespace {

using internal::grouped;
using internal::percent;
using internal::printable_line;

constexpr size_t kTensorsShown = 20;
constexpr int kNumbersWidth = 55;  // of all columns but the name

std::string right(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

// "12345", "12.3M": seven characters at most.
std::string short_count(int64_t count) {
  if (count < 10'000'000) return std::to_string(count);
  const double millions = 1e-6 * static_cast<double>(count);
  return millions < 1e5 ? internal::three_digits(millions < 1000 ? millions : 1e-3 * millions) +
                              (millions < 1000 ? "M" : "G")
                        : ">100G";
}

std::string row_text(const WeightTensor& tensor, const std::string& name) {
  const auto cell = [](const std::string& text, size_t width) { return " " + right(text, width); };
  return name + cell(short_count(tensor.count), 7) + cell(percent(tensor.zeros, tensor.count), 8) +
         cell(percent(tensor.fp16.flushed, tensor.count), 8) +
         cell(percent(tensor.fp16.subnormal, tensor.count), 9) +
         cell(short_count(tensor.fp16.overflow), 8) +
         cell(internal::three_digits(tensor.largest), 9) + "\n";
}

// "2 files: 124,439,808 weights (bf16, f32) in 148 tensors".
std::string heading(const WeightReport& report) {
  std::set<std::string> types;
  std::set<std::string> files;
  for (const WeightTensor& tensor : report.tensors) {
    types.insert(to_string(tensor.dtype));
    if (!tensor.file.empty()) files.insert(tensor.file);
  }
  std::string list;
  for (const std::string& type : types) list += (list.empty() ? "" : ", ") + type;
  std::string text;
  if (files.size() == 1) text = printable_line(*files.begin()) + ": ";
  if (files.size() > 1) text = std::to_string(files.size()) + " files: ";
  return text + grouped(report.total.count) +
         (report.total.count == 1 ? " weight (" : " weights (") + list + ") in " +
         std::to_string(report.tensors.size()) +
         (report.tensors.size() == 1 ? " tensor" : " tensors");
}

std::string left_out_text(const WeightReport& report) {
  const LeftOutWeights& first = report.left_out.front();
  const std::string what = printable_line(first.name) + " (" + printable_line(first.dtype) + ")";
  return report.left_out.size() == 1 ? what + " was left out."
                                     : std::to_string(report.left_out.size()) +
                                           " tensors were left out, " + what + " among them.";
}

}  // namespace

std::string WeightReport::to_string(int width, bool all) const {
  const auto columns = static_cast<size_t>(std::clamp(width, 60, 160));
  const size_t shown = all ? worst_first.size() : std::min(worst_first.size(), kTensorsShown);
  std::vector<std::string> names;
  size_t longest = 7;
  for (size_t i = 0; i < shown; ++i) {
    names.push_back(printable_line(tensors[worst_first[i]].name));
    longest = std::max(longest, internal::column_count(names.back()));
  }
  const size_t common = internal::common_prefix(names);
  const size_t name_width = std::min(longest, std::max<size_t>(columns - kNumbersWidth, 20));
  std::string text = internal::wrapped(heading(*this), columns) + "\n";
  if (shown < worst_first.size()) {
    text += "The " + std::to_string(shown) + " tensors that lose most in FP16 (of " +
            std::to_string(worst_first.size()) + "):\n";
  }
  text += internal::fitted("in FP16", name_width, 0) +
          "   count    zeros  flushed subnormal overflow   largest\n";
  for (size_t i = 0; i < shown; ++i) {
    text += row_text(tensors[worst_first[i]], internal::fitted(names[i], name_width, common));
  }
  if (tensors.size() > 1) text += row_text(total, internal::fitted("total", name_width, 0));
  text += "\n" + internal::wrapped(verdict, columns);
  if (!left_out.empty()) text += internal::wrapped(left_out_text(*this), columns);
  return text;
}

}  // namespace headroom
