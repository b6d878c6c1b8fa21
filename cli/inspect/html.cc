#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/inspect/inspection.h"
#include "cli/output.h"
#include "record/page.h"

namespace headroom::cli {
namespace {

using internal::escape;

constexpr size_t kMostRows = 1000;

std::string fact(const std::string& value, const std::string& what) {
  return fmt::format("<div><b>{}</b><span>{}</span></div>\n", escape(value), escape(what));
}

std::string with_number(float scale) {
  const bool plain = scale >= 1.0f && scale < 1e9f && exact_power(scale).has_value();
  return plain ? fmt::format("{} = {:.0f}", scale_text(scale), scale) : scale_text(scale);
}

std::string advice_section(const Inspection& inspection) {
  const ScaleAdvice& advice = inspection.advice;
  const Magnitudes& seen = inspection.total.magnitudes;
  std::string html = "<section>\n<h2>Static scale</h2>\n<div class=\"facts\">\n";
  if (advice.verdict != ScaleAdvice::Verdict::kNothing) {
    html += fact(with_number(advice.scale), advice_label(inspection) + " scale");
  }
  if (advice.lowest > 0.0f) {
    html +=
        fact(fmt::format("{} to {}", scale_text(advice.lowest), scale_text(advice.highest)),
             fmt::format("no overflow, at most {:.6g} % lost", 100.0 * inspection.options.lose));
  }
  html += fact(fmt::format("{:.3g}", seen.largest()), "largest gradient");
  html += fact(fmt::format("{:.3g}", seen.smallest()), "smallest nonzero");
  html += fact(percent(seen.zeros(), seen.count()), "zeros");
  html += "</div>\n<p>" + escape(advice.reason) + "</p>\n";
  for (const std::string& note : notes(inspection)) {
    html += "<p class=\"note\">" + escape(note) + "</p>\n";
  }
  return html + "</section>\n";
}

/// One part of a bar in the chart.
struct Layer {
  const char* name;
  const char* colour;
  int64_t count;
};

/// The powers of two in the chart: from where nearly all gradients become zero to where nearly all
/// overflow, including scale 1 and the one shown.
std::pair<int, int> chart_powers(const Inspection& inspection) {
  const Magnitudes& seen = inspection.total.magnitudes;
  const auto nearly_all = [&](int64_t count) { return share(count, seen.nonzero()) > 0.99; };
  const auto shown = static_cast<int>(std::lround(std::log2(inspection.scale())));
  auto [first, last] = inspection.powers();
  while (first < std::min(shown, 0) && nearly_all(seen.at(inspection.format, first + 1).flushed)) {
    ++first;
  }
  while (last > std::max(shown, 0) && nearly_all(seen.at(inspection.format, last - 1).overflow)) {
    --last;
  }
  return {std::min(first, shown), std::max(last, shown)};
}

// The geometry of the chart, in SVG units.
constexpr double kLeft = 46, kRight = 10, kTop = 34, kBottom = 40, kWidth = 960, kHeight = 308;
constexpr double kBarHeight = kHeight - kTop - kBottom;

constexpr const char* kHatch =
    "<defs><pattern id=\"hatch\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\" "
    "patternTransform=\"rotate(45)\"><rect width=\"8\" height=\"8\" fill=\"var(--card)\" "
    "opacity=\"0.55\"/><path d=\"M0 0v8\" stroke=\"var(--ink)\" stroke-width=\"2.5\"/></pattern>"
    "</defs>\n";

std::string svg_text(double x, double y, const char* anchor, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     text);
}

/// The bar of one power of two, from what becomes zero at the bottom to what overflows at the top.
std::string chart_bar(const Inspection& inspection, int power, double x, double width) {
  const Magnitudes& seen = inspection.total.magnitudes;
  const Outcome at = seen.at(inspection.format, power);
  const int64_t kept = seen.nonzero() - at.flushed - at.subnormal - at.overflow;
  std::string tip = fmt::format("2^{}:", power);
  std::string rectangles;
  double y = kTop + kBarHeight;
  for (const Layer& layer : {Layer{"become zero", "var(--orange)", at.flushed},
                             Layer{"subnormal", "var(--purple)", at.subnormal},
                             Layer{"keep all bits", "var(--green)", kept},
                             Layer{"overflow", "var(--blue)", at.overflow}}) {
    const double height = kBarHeight * share(layer.count, seen.nonzero());
    y -= height;
    if (layer.count == 0) continue;
    tip += fmt::format(" {} {},", percent(layer.count, seen.nonzero()), layer.name);
    rectangles += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>", x, y,
        width, height, layer.colour);
  }
  tip.pop_back();
  return fmt::format("<g><title>{}</title>{}</g>\n", tip, rectangles);
}

/// Hatches the scales at which anything overflows, however small its share, which is all to the
/// right of the first one.
std::string overflow_zone(const Inspection& inspection, int first, int last, double step) {
  const Magnitudes& seen = inspection.total.magnitudes;
  int power = first;
  while (power <= last && seen.at(inspection.format, power).overflow == 0) ++power;
  if (power > last) return "";
  const double x = kLeft + step * (power - first);
  const double width = step * (last - power + 1);
  std::string svg = fmt::format(
      "<g class=\"hatch\"><title>From 2^{} on, gradients overflow.</title>"
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
      "fill=\"url(#hatch)\"/></g>\n",
      power, x, kTop, width, kBarHeight);
  if (width > 70) svg += svg_text(x + width / 2, kTop - 11, "middle", "overflow");
  return svg;
}

/// A line at the scale of the tables. Its label ends at the line, so that it stays left of the
/// scales that overflow.
std::string chosen_line(const Inspection& inspection, double x) {
  const ScaleAdvice& advice = inspection.advice;
  const bool advised =
      advice.verdict != ScaleAdvice::Verdict::kNothing && advice.scale == inspection.scale();
  const std::string label =
      (advised ? advice_label(inspection) + " " : "scale ") + scale_text(inspection.scale());
  const bool fits = x - kLeft > 7.0 * static_cast<double>(label.size());
  return fmt::format(
      "<path class=\"line\" d=\"M{0:.1f} {1:.1f}v{2:.1f}\" stroke=\"var(--ink)\" "
      "stroke-width=\"2\" "
      "stroke-dasharray=\"4 3\"/>\n<text class=\"chosen\" x=\"{3:.1f}\" y=\"{4:.1f}\" "
      "text-anchor=\"{5}\" style=\"fill:var(--ink)\">{6}</text>\n",
      x, kTop - 20, kBarHeight + 20, fits ? x - 5 : x + 5, kTop - 11, fits ? "end" : "start",
      escape(label));
}

/// A chart with one bar per power of two.
std::string chart_section(const Inspection& inspection) {
  if (inspection.total.magnitudes.nonzero() == 0) return "";
  const auto [first, last] = chart_powers(inspection);
  const double step = (kWidth - kLeft - kRight) / (last - first + 1);
  const int label_every = step < 14 ? 8 : 4;
  std::string svg;
  for (int power = first; power <= last; ++power) {
    const double x = kLeft + step * (power - first);
    svg += chart_bar(inspection, power, x, std::max(step - 1.5, 1.0));
    if (power % label_every != 0) continue;
    svg += svg_text(x + step / 2, kTop + kBarHeight + 16, "middle", fmt::format("2^{}", power));
  }
  svg += overflow_zone(inspection, first, last, step);
  const double chosen = kLeft + step * (std::log2(double{inspection.scale()}) - first + 0.5);
  svg += chosen_line(inspection, std::clamp(chosen, kLeft, kWidth - kRight));
  for (const int tick : {0, 50, 100}) {
    const double y = kTop + kBarHeight * (100 - tick) / 100.0 + 4;
    svg += svg_text(kLeft - 6, y, "end", fmt::format("{} %", tick));
  }
  svg += svg_text((kLeft + kWidth) / 2, kHeight - 6, "middle", "scale");
  const auto key = [](const char* colour, const char* name) {
    return fmt::format("<span><i style=\"background:var(--{})\"></i>{}</span>\n", colour, name);
  };
  return fmt::format(
      "<section>\n<h2>All gradients in {} at every power of two</h2>\n"
      "<p class=\"note\">Shares of the gradients that are finite and not zero. At hatched scales "
      "something overflows, which costs the whole step however small its share is.</p>\n"
      "<div class=\"key\">{}{}{}{}</div>\n"
      "<div class=\"wide\"><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"Shares by "
      "scale\">\n{}{}</svg></div>\n</section>\n",
      inspection.options.format, key("orange", "become zero"), key("purple", "subnormal"),
      key("green", "keep all bits"), key("blue", "overflow"), kWidth, kHeight, kHatch, svg);
}

std::string row_html(const Inspection& inspection, const Row& row, const std::string& label) {
  const Magnitudes& seen = row.magnitudes;
  const Outcome at = inspection.outcome(row);
  const auto number = [](const std::string& text, const char* more = "") {
    return fmt::format("<td class=\"n{}\">{}</td>", more, escape(text));
  };
  const int64_t lost = at.flushed + at.overflow;
  const bool bad = share(lost, seen.nonzero()) > inspection.options.lose || at.overflow > 0;
  return "<tr><td class=\"name\">" + escape(label) + "</td>" + number(grouped(seen.count())) +
         number(percent(seen.zeros(), seen.count())) + number(percent(at.flushed, seen.count())) +
         number(percent(at.subnormal, seen.count())) + number(percent(at.overflow, seen.count())) +
         number(percent(lost, seen.nonzero()), bad ? " bad" : "") +
         number(fmt::format("{:.3g}", seen.smallest())) +
         number(fmt::format("{:.3g}", seen.largest())) + "</tr>\n";
}

std::string tensor_section(const Inspection& inspection) {
  const std::vector<size_t> order = inspection.worst_first();
  const size_t shown = std::min(order.size(), kMostRows);
  std::string html = fmt::format(
      "<section>\n<h2>Tensors in {} at scale {}</h2>\n"
      "<p class=\"note\">The tensors that lose most come first{}. \"Lost\" is the share of the "
      "nonzero gradients that become zero or overflow; the others are shares of all elements.</p>\n"
      "<div class=\"wide\"><table>\n<tr><th>tensor</th>",
      inspection.options.format, escape(scale_text(inspection.scale())),
      shown < order.size() ? fmt::format("; {} of {}", shown, order.size()) : "");
  for (const char* heading :
       {"count", "zeros", "flushed", "subnormal", "overflow", "lost", "smallest", "largest"}) {
    html += fmt::format("<th class=\"n\">{}</th>", heading);
  }
  html += "</tr>\n";
  if (order.size() > 1) html += row_html(inspection, inspection.total, "total");
  for (size_t i = 0; i < shown; ++i) {
    const Row& row = inspection.rows[order[i]];
    html += row_html(inspection, row, inspection.label(row));
  }
  return html + "</table></div>\n</section>\n";
}

constexpr const char* kStyle =
    "<style>\n"
    ".key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; margin-bottom: 6px; }\n"
    ".key i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; }\n"
    ".wide svg { min-width: 640px; width: 100%; }\n"
    "td.name { white-space: normal; min-width: 150px; }\n"
    "</style>\n";

}  // namespace

std::string html_page(const Inspection& inspection) {
  const size_t files = inspection.files.size();
  const std::string where = files == 1 ? inspection.files[0].path : fmt::format("{} files", files);
  const std::string title = "Gradients in " + inspection.options.format;
  const std::string body =
      kStyle +
      fmt::format(
          "<header><h1>{}</h1>\n<p class=\"sub\">{}: {} gradients in {} tensor{}</p>"
          "</header>\n",
          escape(title), escape(where), grouped(inspection.total.magnitudes.count()),
          inspection.rows.size(), inspection.rows.size() == 1 ? "" : "s") +
      advice_section(inspection) + chart_section(inspection) + tensor_section(inspection) +
      "<footer>Written by headroom inspect.</footer>\n";
  return internal::page(title, body);
}

}  // namespace headroom::cli
