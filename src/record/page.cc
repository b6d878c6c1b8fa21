#include "record/page.h"

#include <cstddef>
#include <string>

#include "record/text.h"

namespace headroom::internal {
namespace {

struct PageColour {
  const char* name;
  const char* light;
  const char* dark;
};

// The colours of Okabe and Ito, which remain distinguishable for colour-blind readers, darkened or
// lightened until text has a contrast of at least 4.5 (WCAG AA) against the card.
constexpr PageColour kColours[] = {
    {"page", "#f6f6f4", "#111417"},   {"card", "#ffffff", "#191d21"},
    {"ink", "#1b1f23", "#e7eaed"},    {"muted", "#59616a", "#9aa4ae"},
    {"line", "#dfe1e4", "#2f353b"},   {"blue", "#0069a8", "#5db4ec"},
    {"orange", "#b84a00", "#f2904a"}, {"green", "#00704f", "#3fc99b"},
    {"purple", "#9a4b7c", "#d891b8"}, {"gold", "#8a6a00", "#dcb43c"},
};

constexpr const char* kRunColours[] = {"blue", "green", "purple", "gold", "ink", "muted"};

// The colours as custom properties: --blue, ..., and --run0, ... for the curves of runs.
std::string colour_style() {
  std::string light = ":root { color-scheme: light dark;", dark = ":root {";
  for (const PageColour& colour : kColours) {
    light += std::string(" --") + colour.name + ": " + colour.light + ";";
    dark += std::string(" --") + colour.name + ": " + colour.dark + ";";
  }
  for (size_t i = 0; i < std::size(kRunColours); ++i) {
    light += " --run" + std::to_string(i) + ": var(--" + kRunColours[i] + ");";
  }
  return "\n" + light + " }\n@media (prefers-color-scheme: dark) { " + dark + " } }";
}

constexpr std::string_view kStyle = R"css(
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 28px 24px 48px; max-width: 1120px;
  background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
header { margin: 0 0 20px; }
h1 { margin: 0; font-size: 26px; line-height: 1.25; letter-spacing: -0.01em; }
h2 { margin: 0 0 4px; font-size: 17px; line-height: 1.35; }
h3 { margin: 14px 0 4px; font-size: 15px; }
.sub, .note { margin: 2px 0 10px; color: var(--muted); }
.note { font-size: 14px; max-width: 78ch; }
section {
  margin: 0 0 16px; padding: 18px 20px; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card);
}
.facts { display: flex; flex-wrap: wrap; gap: 10px 34px; margin: 0 0 4px; }
.facts b { display: block; font-size: 20px; line-height: 1.3; font-weight: 600; }
.facts span { color: var(--muted); font-size: 13px; }
.wide { overflow-x: auto; margin: 0 -4px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td {
  padding: 6px 12px 6px 4px; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: baseline; white-space: nowrap;
}
th { color: var(--muted); font-weight: 500; font-size: 13px; }
tr:last-child td { border-bottom: 0; }
th.n, td.n { text-align: right; padding: 6px 4px 6px 12px; }
td.good { color: var(--green); }
td.bad { color: var(--orange); }
code, pre { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
svg, canvas { display: block; }
svg text { fill: var(--muted); font-size: 12px; }
a { color: var(--blue); }
button, select, input { font: inherit; color: inherit; }
:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
footer { margin: 20px 2px 0; color: var(--muted); font-size: 13px; }
@media (max-width: 640px) {
  body { padding: 18px 12px 36px; }
  section { padding: 14px 12px; border-radius: 8px; }
  h1 { font-size: 22px; }
  .facts { gap: 8px 24px; }
  .facts b { font-size: 18px; }
}
@media print { body { background: none; } section { break-inside: avoid; } }
)css";

}  // namespace

std::vector<std::string> run_colours() {
  std::vector<std::string> colours;
  for (const std::string_view name : kRunColours) {
    for (const PageColour& colour : kColours) {
      if (name == colour.name) colours.emplace_back(colour.light);
    }
  }
  return colours;
}

std::string escape(std::string_view text) {
  std::string html;
  html.reserve(text.size());
  for_each_character(text, [&](std::string_view character, bool valid) {
    const char c = character.front();
    const bool whitespace = c == '\t' || c == '\n';
    if (!valid || (is_control_character(character) && !whitespace)) {
      html += kReplacementCharacter;
    } else if (c == '&') {
      html += "&amp;";
    } else if (c == '<') {
      html += "&lt;";
    } else if (c == '>') {
      html += "&gt;";
    } else if (c == '"') {
      html += "&quot;";
    } else if (c == '\'') {
      html += "&#39;";
    } else {
      html += character;
    }
  });
  return html;
}

std::string page(std::string_view title, std::string_view body) {
  std::string html = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  // No network access. 'self' is the server of a live report; for a file it matches nothing.
  html +=
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
      "base-uri 'none'; form-action 'none'\">\n";
  html += "<link rel=\"icon\" href=\"data:,\">\n<title>";
  html += escape(title);
  html += "</title>\n<style>";
  html += colour_style();
  html += kStyle;
  html += "</style>\n</head>\n<body>\n";
  html += body;
  html += "\n</body>\n</html>\n";
  return html;
}

}  // namespace headroom::internal
