#include "cli/inspect/inspection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "cli/output.h"
#include "files/tensor_file.h"

namespace headroom::cli {
namespace {

std::string base_name(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

}  // namespace

std::optional<int> exact_power(float scale) {
  int exponent = 0;
  if (std::frexp(scale, &exponent) != 0.5f) return std::nullopt;
  return exponent - 1;
}

Outcome Inspection::outcome(const Row& row) const {
  const std::optional<int> power = exact_power(scale());
  return power ? row.magnitudes.at(format, *power) : row.exact;
}

std::string Inspection::label(const Row& row) const {
  if (files.size() == 1) return row.name;
  const std::string& path = files[row.file].path;
  const std::string name = base_name(path);
  // The only array of an .npy file is named after the file.
  const bool named_after = name == row.name + ".npy";
  const bool unique = std::count_if(files.begin(), files.end(), [&](const FileInfo& other) {
                        return base_name(other.path) == name;
                      }) == 1;
  if (named_after) return unique ? row.name : path;
  return (unique ? name : path) + ":" + row.name;
}

std::vector<size_t> Inspection::worst_first() const {
  std::vector<std::tuple<int64_t, double, double, size_t>> keys;  // negated: sorted ascending
  for (size_t i = 0; i < rows.size(); ++i) {
    const Outcome at = outcome(rows[i]);
    const int64_t nonzero = rows[i].magnitudes.nonzero();
    keys.emplace_back(-at.overflow, -share(at.flushed, nonzero), -share(at.subnormal, nonzero), i);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<size_t> order;
  for (const auto& key : keys) order.push_back(std::get<3>(key));
  return order;
}

std::pair<int, int> Inspection::powers() const {
  const int64_t nonzero = total.magnitudes.nonzero();
  if (nonzero == 0) return {0, 0};
  int first = -126;
  int last = 126;
  while (first < last && total.magnitudes.at(format, first + 1).flushed == nonzero) ++first;
  while (last > first && total.magnitudes.at(format, last - 1).overflow == nonzero) --last;
  return {std::min(first, 0), std::max(last, 0)};
}

std::string advice_label(const Inspection& inspection) {
  const ScaleAdvice& advice = inspection.advice;
  if (advice.verdict != ScaleAdvice::Verdict::kNoneFits) return "recommended";
  return advice.scale == 0x1p-126f ? "smallest" : "largest safe";
}

std::string range_sentence(const Inspection& inspection) {
  const ScaleAdvice& advice = inspection.advice;
  if (advice.verdict == ScaleAdvice::Verdict::kNothing) return "";
  const std::string lose = fmt::format("{:.6g} %", 100.0 * inspection.options.lose);
  if (advice.lowest == 0.0f) {
    return fmt::format(
        "At every power of two, something overflows or more than {} of the nonzero gradients "
        "become "
        "zero.",
        lose);
  }
  return fmt::format(
      "From {} to {} nothing overflows and at most {} of the nonzero gradients become zero.",
      scale_text(advice.lowest), scale_text(advice.highest), lose);
}

std::vector<std::string> notes(const Inspection& inspection) {
  std::vector<std::string> notes;
  for (const Row& row : inspection.rows) {
    const int64_t bad = row.magnitudes.infs() + row.magnitudes.nans();
    if (bad == 0) continue;
    notes.push_back(fmt::format(
        "{} inf and {} nan, first in {}: they count as elements, but not as zeros, flushed, "
        "subnormal or overflow.",
        grouped(inspection.total.magnitudes.infs()), grouped(inspection.total.magnitudes.nans()),
        inspection.label(row)));
    break;
  }
  for (const FileInfo& file : inspection.files) {
    if (file.left_out.empty()) continue;
    const auto& [name, type] = file.left_out.front();
    notes.push_back(file.left_out.size() == 1
                        ? fmt::format("{}: {} was left out ({}).", file.path, name, type)
                        : fmt::format("{}: {} tensors were left out, {} ({}) among them.",
                                      file.path, file.left_out.size(), name, type));
    if (std::any_of(file.left_out.begin(), file.left_out.end(),
                    [](const auto& left) { return files::may_be_bf16(left.second); })) {
      notes.back() += " If its 16-bit elements are bf16, add --as bf16.";
    }
  }
  const bool f16_dump = std::any_of(inspection.rows.begin(), inspection.rows.end(),
                                    [](const Row& row) { return row.dtype == DType::kF16; });
  if (f16_dump && inspection.format == Format::kFP16) {
    notes.emplace_back(
        "Gradients saved as f16 have already lost what FP16 cannot hold: some zeros may have been "
        "nonzero.");
  }
  return notes;
}

}  // namespace headroom::cli
