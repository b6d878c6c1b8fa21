#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/inspect/inspection.h"
#include "cli/output.h"

namespace headroom::cli {
namespace {

constexpr size_t kTensorsShown = 20;
constexpr int kNumbersWidth = 54;  // of all columns but the name

using internal::printable_line;

void print_wrapped(const std::string& sentence, int width) {
  print_text(internal::wrapped(sentence, static_cast<size_t>(width)));
}

void print_head(const Inspection& inspection, int width) {
  const Magnitudes& seen = inspection.total.magnitudes;
  std::set<std::string> types;
  for (const Row& row : inspection.rows) types.insert(to_string(row.dtype));
  const std::string list = fmt::format("{}", fmt::join(types, ", "));
  const std::string where = inspection.files.size() == 1
                                ? inspection.files[0].path
                                : fmt::format("{} files", inspection.files.size());
  const std::string line = printable_line(where);
  std::string text =
      fmt::format("{}: {} gradients ({}) in {} tensor{}, {} of them zeros", line,
                  grouped(seen.count()), list, inspection.rows.size(),
                  inspection.rows.size() == 1 ? "" : "s", percent(seen.zeros(), seen.count()));
  if (seen.nonzero() > 0) {
    text += fmt::format(", the others from {:.3g} to {:.3g}", seen.smallest(), seen.largest());
  }
  print_wrapped(text, width);
}

/// Prints all gradients at the powers of two. Neighbours with the same shares share a line.
void print_powers(const Inspection& inspection) {
  const Magnitudes& seen = inspection.total.magnitudes;
  auto [first, last] = inspection.powers();
  if (!inspection.options.all) {
    // From scale 1 to one power beyond the first overflow.
    const int chosen = exact_power(inspection.scale()).value_or(0);
    first = std::min(0, chosen);
    int end = std::max(0, chosen);
    while (end < last && seen.at(inspection.format, end).overflow == 0) ++end;
    last = std::min(last, end + 1);
  }
  const auto shares = [&](int power) {
    const Outcome at = seen.at(inspection.format, power);
    return fmt::format("  {:>9}  {:>9}  {:>9}  {:>9}", percent(at.flushed, seen.count()),
                       percent(at.subnormal, seen.count()), percent(at.overflow, seen.count()),
                       percent(at.flushed + at.overflow, seen.nonzero()));
  };
  const std::string heading = inspection.options.format + " at scale";
  print("\n{:<18}  {:>9}  {:>9}  {:>9}  {:>9}\n", heading, "flushed", "subnormal", "overflow",
        "lost");
  for (int power = first; power <= last;) {
    const std::string line = shares(power);
    const bool chosen = std::ldexp(1.0f, power) == inspection.advice.scale;
    int end = power;
    while (!chosen && end < last && shares(end + 1) == line &&
           std::ldexp(1.0f, end + 1) != inspection.advice.scale) {
      ++end;
    }
    const std::string scales =
        end == power ? fmt::format("2^{}", power) : fmt::format("2^{} to 2^{}", power, end);
    print("{:<18}{}{}\n", scales, line, chosen ? "  <- " + advice_label(inspection) : "");
    power = end + 1;
  }
}

void print_row(const Inspection& inspection, const Row& row, const std::string& name) {
  const Magnitudes& seen = row.magnitudes;
  const Outcome at = inspection.outcome(row);
  const std::string count = seen.count() < 10'000'000
                                ? std::to_string(seen.count())
                                : fmt::format("{:.4g}M", 1e-6 * static_cast<double>(seen.count()));
  print("{} {:>7} {:>8} {:>8} {:>9} {:>8} {:>8}\n", name, count,
        percent(seen.zeros(), seen.count()), percent(at.flushed, seen.count()),
        percent(at.subnormal, seen.count()), percent(at.overflow, seen.count()),
        percent(at.flushed + at.overflow, seen.nonzero()));
}

void print_tensors(const Inspection& inspection, int width) {
  const std::vector<size_t> order = inspection.worst_first();
  const size_t shown =
      inspection.options.all ? order.size() : std::min(order.size(), kTensorsShown);
  std::vector<std::string> names;
  size_t longest = 6;
  for (size_t i = 0; i < shown; ++i) {
    names.push_back(printable_line(inspection.label(inspection.rows[order[i]])));
    longest = std::max(longest, internal::column_count(names.back()));
  }
  const size_t common = internal::common_prefix(names);
  const size_t name_width =
      std::min(longest, static_cast<size_t>(std::max(width - kNumbersWidth, 20)));
  print("\n{} at scale {}", inspection.options.format, scale_text(inspection.scale()));
  if (order.size() > shown) {
    print(", the {} of {} tensors that lose most (--all shows every one)", shown, order.size());
  }
  print("\n{:<{}} {:>7} {:>8} {:>8} {:>9} {:>8} {:>8}\n", "tensor", name_width, "count", "zeros",
        "flushed", "subnormal", "overflow", "lost");
  for (size_t i = 0; i < shown; ++i) {
    print_row(inspection, inspection.rows[order[i]],
              internal::fitted(names[i], name_width, common));
  }
  if (order.size() > 1) {
    print_row(inspection, inspection.total, internal::fitted("total", name_width, 0));
  }
}

}  // namespace

void print_table(const Inspection& inspection) {
  const int width = std::clamp(terminal_width(STDOUT_FILENO), 60, 160);
  print_head(inspection, width);
  const bool any = inspection.total.magnitudes.nonzero() > 0;
  if (any && !inspection.options.scale.has_value()) print_powers(inspection);
  print_tensors(inspection, width);
  print("\n");
  print_wrapped(inspection.advice.reason, width);
  const std::string range = range_sentence(inspection);
  if (!range.empty()) print_wrapped(range, width);
  for (const std::string& note : notes(inspection)) {
    print_wrapped(printable_line(note), width);
  }
}

}  // namespace headroom::cli
