#include <headroom/measure.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "record/report.h"

namespace headroom::internal {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostPoints = 3000;        // of a curve, in a report of one run
constexpr size_t kFewestPoints = 300;       // in a report of very many
constexpr size_t kMostSkips = 1500;         // that are marked one by one
constexpr size_t kMostCells = 1200 * 1000;  // of all heat maps together
constexpr size_t kFewestColumns = 24;       // of a heat map
constexpr size_t kRowsGuess = 30;

// Shares are drawn in 62 shades, one character each.
constexpr std::string_view kShades =
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

// Six digits are more than a screen shows, but a power of two stays one. Null where JSON has no
// number.
ordered_json brief(double value) {
  if (!std::isfinite(value)) return nullptr;
  int exponent = 0;
  if (std::frexp(value, &exponent) == 0.5) return value;
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return std::strtod(text, nullptr);
}

struct Points {
  ordered_json steps = ordered_json::array();
  ordered_json values = ordered_json::array();
  void add(int64_t step, double value) {
    steps.push_back(step);
    values.push_back(brief(value));
  }
  ordered_json json() && { return {std::move(steps), std::move(values)}; }
};

// At most `most` points. Every stretch of steps keeps its smallest and its largest value, in their
// order, and one that is not finite if there is any; the last step is always there.
template <typename Get>
ordered_json thinned(const std::vector<HistoryStep>& steps, size_t most, const Get& get) {
  Points points;
  const bool finite = std::all_of(steps.begin(), steps.end(), [&](const HistoryStep& step) {
    return std::isfinite(get(step));
  });
  const size_t stretches = (most - 1) / (finite ? 2 : 3);
  const size_t stretch = steps.size() <= most ? 1 : (steps.size() + stretches - 1) / stretches;
  for (size_t begin = 0; begin < steps.size(); begin += stretch) {
    const size_t end = std::min(begin + stretch, steps.size());
    std::set<size_t> kept;
    size_t low = end, high = end;
    for (size_t i = begin; i < end; ++i) {
      const double value = get(steps[i]);
      if (!std::isfinite(value)) {
        if (kept.empty()) kept.insert(i);
        continue;
      }
      if (low == end || value < get(steps[low])) low = i;
      if (high == end || value > get(steps[high])) high = i;
    }
    if (low != end) kept.insert({low, high});
    if (end == steps.size()) kept.insert(end - 1);
    for (const size_t i : kept) points.add(steps[i].step, get(steps[i]));
  }
  return std::move(points).json();
}

// The scale moves seldom: the steps at which it does are enough, unless there are too many.
ordered_json scale_points(const std::vector<HistoryStep>& steps, size_t most) {
  Points points;
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool moved = i == 0 || steps[i].scale != steps[i - 1].scale;
    if (moved || i + 1 == steps.size()) points.add(steps[i].step, steps[i].scale);
  }
  if (points.steps.size() <= most) return std::move(points).json();
  return thinned(steps, most, [](const HistoryStep& step) { return step.scale; });
}

ordered_json skip_list(const History& history) {
  ordered_json list = ordered_json::array();
  const auto skipped = static_cast<size_t>(history.skipped);
  const size_t every = (skipped + kMostSkips - 1) / kMostSkips;
  size_t index = 0;
  for (const HistoryStep& step : history.steps) {
    if (step.applied || index++ % every != 0) continue;
    list.push_back({step.step, brief(step.scale), step.culprit});
  }
  return list;
}

char shade(int64_t part, int64_t whole) {
  if (part <= 0 || whole <= 0) return kShades[0];
  const double share = static_cast<double>(part) / static_cast<double>(whole);
  const auto level = static_cast<size_t>(std::ceil(std::sqrt(std::min(share, 1.0)) * 61.0));
  return kShades[std::clamp<size_t>(level, 1, 61)];
}

// A layer's heat map: for every column, from the lowest exponent up, the share of the elements that
// are not zero; and beside it the shares of zeros and of inf and nan.
ordered_json heat_map(const std::string& name, const std::vector<const HistoryLook*>& columns) {
  int from = GradDetail::kMaxExponent, to = GradDetail::kMinExponent;  // to: past the last
  for (const HistoryLook* look : columns) {
    const auto layer = look->layers.find(name);
    if (layer == look->layers.end() || layer->second.histogram.empty()) continue;
    from = std::min(from, layer->second.from);
    to = std::max(to, layer->second.from + static_cast<int>(layer->second.histogram.size()));
  }
  const int rows = std::max(0, to - from);
  std::string cells, zeros, bad;
  for (const HistoryLook* look : columns) {
    const auto found = look->layers.find(name);
    const HistoryLayer layer = found == look->layers.end() ? HistoryLayer() : found->second;
    int64_t nonzero = 0;
    for (const int64_t count : layer.histogram) nonzero += count;
    std::string column(static_cast<size_t>(rows), kShades[0]);
    for (size_t i = 0; i < layer.histogram.size(); ++i) {
      column[static_cast<size_t>(layer.from - from) + i] = shade(layer.histogram[i], nonzero);
    }
    cells += column;
    zeros += shade(layer.zeros, layer.count);
    bad += shade(layer.not_finite, layer.count);
  }
  return {
      {"from", from}, {"rows", rows}, {"cells", cells}, {"zeroCells", zeros}, {"badCells", bad}};
}

std::vector<const HistoryLook*> columns_of(const History& history, size_t most) {
  const std::vector<HistoryLook>& looks = history.looks;
  std::vector<const HistoryLook*> columns;
  const size_t count = std::min(looks.size(), most);
  for (size_t i = 0; i < count; ++i) {
    const size_t index = count == 1 ? looks.size() - 1 : i * (looks.size() - 1) / (count - 1);
    columns.push_back(&looks[index]);
  }
  return columns;
}

void add_layers(const History& history, size_t most_columns, ordered_json* run) {
  const std::vector<const HistoryLook*> columns = columns_of(history, most_columns);
  ordered_json steps = ordered_json::array(), scales = ordered_json::array();
  for (const HistoryLook* look : columns) {
    steps.push_back(look->step);
    scales.push_back(brief(look->scale));
  }
  (*run)["looks"] = {{"steps", steps}, {"scales", scales}};

  std::vector<std::pair<std::string, LayerExtremes>> layers(history.extremes.begin(),
                                                            history.extremes.end());
  std::stable_sort(layers.begin(), layers.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.lost, a.second.subnormal) >
           std::pair(b.second.lost, b.second.subnormal);
  });
  (*run)["layers"] = ordered_json::array();
  for (const auto& [name, worst] : layers) {
    const auto found = history.looks.back().layers.find(name);
    const HistoryLayer now =
        found == history.looks.back().layers.end() ? HistoryLayer() : found->second;
    ordered_json layer = {{"name", name},
                          {"lost", brief(worst.lost)},
                          {"subnormal", brief(worst.subnormal)},
                          {"zeros", brief(worst.zeros)},
                          {"top", brief(now.amax)},
                          {"bad", now.not_finite}};
    layer.update(heat_map(name, columns));
    (*run)["layers"].push_back(std::move(layer));
  }
  if (history.looks.empty()) return;
  const HistoryLook& last = history.looks.back();
  (*run)["bounds"] = {{"step", last.step},
                      {"scale", brief(last.scale)},
                      {"overflow", last.first_to_overflow},
                      {"doublings", brief(last.doublings_left)},
                      {"underflow", last.first_to_underflow},
                      {"lost", brief(last.lost)},
                      {"subnormal", brief(last.subnormal)}};
}

ordered_json run_json(const ReportRun& source, size_t points, size_t columns) {
  const History& history = *source.history;
  ordered_json run = {{"name", history.name},
                      {"group", history.group},
                      {"place", source.place},
                      {"started", history.started},
                      {"end", history.end},
                      {"cut", source.cut},
                      {"settings", ordered_json::array()},
                      {"results", ordered_json::array()},
                      {"notes", ordered_json::array()},
                      {"count", history.steps.size()},
                      {"skipped", history.skipped}};
  for (const auto& [key, value] : history.settings) run["settings"].push_back({key, value});
  for (const auto& [key, value] : history.results) run["results"].push_back({key, brief(value)});
  for (const HistoryNote& note : history.notes) run["notes"].push_back({note.step, note.text});
  run["seconds"] = history.steps.empty() ? 0.0 : history.steps.back().seconds;
  run["loss"] = thinned(history.steps, points, [](const HistoryStep& step) { return step.loss; });
  run["norm"] =
      thinned(history.steps, points, [](const HistoryStep& step) { return step.grad_norm; });
  run["scale"] = scale_points(history.steps, points);
  run["skips"] = skip_list(history);
  add_layers(history, columns, &run);
  return run;
}

}  // namespace

std::string report_data(const std::string& title, const std::vector<ReportRun>& runs,
                        const std::vector<std::string>& left_out) {
  size_t layers = 0;
  for (const ReportRun& run : runs) layers += run.history->extremes.size();
  const size_t columns =
      std::max(kFewestColumns, kMostCells / std::max<size_t>(1, layers * kRowsGuess));
  const size_t points = std::max(kFewestPoints, kMostPoints / std::max<size_t>(1, runs.size()));
  ordered_json data = {{"title", title}, {"left_out", left_out}, {"runs", ordered_json::array()}};
  for (const ReportRun& run : runs) data["runs"].push_back(run_json(run, points, columns));
  return data.dump(-1, ' ', true, ordered_json::error_handler_t::replace);
}

}  // namespace headroom::internal
