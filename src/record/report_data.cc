#include <headroom/measure.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "diagnose/rules.h"
#include "record/report.h"

namespace headroom::internal {
namespace {

using nlohmann::ordered_json;

// Limits on the size of the page.
constexpr size_t kMostPoints = 20000;       // per curve, in a report of one run
constexpr size_t kFewestPoints = 300;       // per curve, in a report of very many runs
constexpr size_t kMostSkips = 1500;         // skipped steps that are listed with their culprits
constexpr size_t kMostCells = 1200 * 1000;  // of all heat maps together
constexpr size_t kFewestColumns = 24;       // per heat map
constexpr size_t kTypicalRows = 30;         // per heat map: exponents that occur in a tensor

// Shares are drawn in 62 shades, encoded as one character each.
constexpr std::string_view kShades =
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

// Rounds to six digits, which are enough for a screen, but leaves powers of two exact. inf and nan
// become null.
ordered_json rounded(double value) {
  if (!std::isfinite(value)) return nullptr;
  int exponent = 0;
  if (std::frexp(value, &exponent) == 0.5) return value;
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return std::strtod(text, nullptr);
}

// A curve: steps and values of the same length.
struct Points {
  ordered_json steps = ordered_json::array();
  ordered_json values = ordered_json::array();
  void add(int64_t step, double value) {
    steps.push_back(step);
    values.push_back(rounded(value));
  }
  ordered_json json() && { return {std::move(steps), std::move(values)}; }
};

// The steps of a curve that are kept, as indices: at most `most`. Divides the steps into stretches
// and keeps the smallest and the largest value of each, so that spikes remain visible, one value
// that is not finite if there is any, and the last step. The lengths of stretches are powers of
// two, so that compared runs have the last steps of the longest stretches in common.
template <typename Get>
std::set<size_t> kept_steps(const std::vector<HistoryStep>& steps, size_t most, const Get& get) {
  const bool finite = std::all_of(steps.begin(), steps.end(), [&](const HistoryStep& step) {
    return std::isfinite(get(step));
  });
  const size_t stretches = (most - 1) / (finite ? 3 : 4);
  const size_t stretch =
      steps.size() <= most ? 1 : std::bit_ceil((steps.size() + stretches - 1) / stretches);
  std::set<size_t> kept;
  if (!steps.empty()) kept.insert(0);
  for (size_t begin = 0; begin < steps.size(); begin += stretch) {
    const size_t end = std::min(begin + stretch, steps.size());
    size_t low = end, high = end, bad = end;
    for (size_t i = begin; i < end; ++i) {
      const double value = get(steps[i]);
      if (!std::isfinite(value)) {
        if (bad == end) bad = i;
        continue;
      }
      if (low == end || value < get(steps[low])) low = i;
      if (high == end || value > get(steps[high])) high = i;
    }
    if (low != end) kept.insert({low, high});
    if (bad != end) kept.insert(bad);
    kept.insert(end - 1);
  }
  return kept;
}

template <typename Get>
ordered_json curve(const std::vector<HistoryStep>& steps, const std::set<size_t>& kept,
                   const Get& get) {
  Points points;
  for (const size_t i : kept) points.add(steps[i].step, get(steps[i]));
  return std::move(points).json();
}

// The scale changes rarely, so the steps at which it changes are enough, unless there are too many.
ordered_json scale_points(const std::vector<HistoryStep>& steps, size_t most) {
  const auto get = [](const HistoryStep& step) { return step.scale; };
  std::set<size_t> changes;
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool moved = i == 0 || steps[i].scale != steps[i - 1].scale;
    if (moved || i + 1 == steps.size()) changes.insert(i);
  }
  return curve(steps, changes.size() <= most ? changes : kept_steps(steps, most, get), get);
}

// The skipped steps that the page can show: an even selection with their culprits, and those among
// the `kept` steps of the loss, so that no step is shown without saying that it was skipped.
ordered_json skip_list(const History& history, const std::set<size_t>& kept) {
  ordered_json list = ordered_json::array();
  const auto skipped = static_cast<size_t>(history.skipped);
  const size_t every = std::max<size_t>(1, (skipped + kMostSkips - 1) / kMostSkips);
  size_t seen = 0;
  for (size_t i = 0; i < history.steps.size(); ++i) {
    const HistoryStep& step = history.steps[i];
    if (step.applied) continue;
    const bool listed = seen++ % every == 0;
    if (!listed && !kept.contains(i)) continue;
    list.push_back({step.step, rounded(step.scale), listed ? step.culprit : ""});
  }
  return list;
}

// Steps per second over the last half minute; null if there are no two steps to measure it by.
ordered_json recent_rate(const std::vector<HistoryStep>& steps) {
  constexpr double kSeconds = 30.0;
  if (steps.size() < 2) return nullptr;
  const HistoryStep& last = steps.back();
  size_t i = steps.size() - 2;
  while (i > 0 && steps[i - 1].seconds >= last.seconds - kSeconds) --i;
  const double seconds = last.seconds - steps[i].seconds;
  const double done = static_cast<double>(last.step) - static_cast<double>(steps[i].step);
  return rounded(done / seconds);
}

// The number of steps that a run is going to have, from its setting "steps"; null if unknown.
ordered_json planned_steps(const History& history) {
  for (const auto& [name, value] : history.settings) {
    int64_t steps = 0;
    const char* const end = value.data() + value.size();
    if (name != "steps") continue;
    if (std::from_chars(value.data(), end, steps).ptr == end && steps > 0) return steps;
  }
  return nullptr;
}

// The square root spreads small shares over more shades. Only 0 gets the first shade.
char shade(int64_t part, int64_t whole) {
  if (part <= 0 || whole <= 0) return kShades[0];
  const double share = static_cast<double>(part) / static_cast<double>(whole);
  const auto level = static_cast<size_t>(std::ceil(std::sqrt(std::min(share, 1.0)) * 61.0));
  return kShades[std::clamp<size_t>(level, 1, 61)];
}

// A tensor of a snapshot; an empty one if the snapshot does not have it.
const HistoryLayer& layer_in(const LayerSnapshot& snapshot, const std::string& name) {
  static const HistoryLayer kNone;
  const auto found = snapshot.layers.find(name);
  return found == snapshot.layers.end() ? kNone : found->second;
}

// A tensor's heat map. Each column has the shares of its exponents in the nonzero elements, from
// the lowest exponent up, and separately the shares of zeros and of inf and nan.
ordered_json heat_map(const std::string& name, const std::vector<const LayerSnapshot*>& columns) {
  // All columns share the same range of exponents.
  int from = GradDetail::kMaxExponent, to = GradDetail::kMinExponent;  // to: past the last
  for (const LayerSnapshot* snapshot : columns) {
    const HistoryLayer& layer = layer_in(*snapshot, name);
    if (layer.histogram.empty()) continue;
    from = std::min(from, layer.from);
    to = std::max(to, layer.from + static_cast<int>(layer.histogram.size()));
  }
  const int rows = std::max(0, to - from);
  std::string cells, zeros, bad;
  for (const LayerSnapshot* snapshot : columns) {
    const HistoryLayer& layer = layer_in(*snapshot, name);
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

// At most `most` snapshots, evenly chosen: the last one and, if there is more than one, the first.
std::vector<const LayerSnapshot*> columns_of(const std::vector<LayerSnapshot>& snapshots,
                                             size_t most) {
  std::vector<const LayerSnapshot*> columns;
  const size_t last = snapshots.size() - 1;
  const size_t count = std::min(snapshots.size(), most);
  for (size_t i = 0; i < count; ++i) {
    columns.push_back(&snapshots[count == 1 ? last : i * last / (count - 1)]);
  }
  return columns;
}

// The tensors that bound the scale in a snapshot, in the precision of the run.
ordered_json bounds_json(const FloatRange& range, const LayerSnapshot& snapshot) {
  std::vector<LayerStats> layers;
  for (const auto& [name, layer] : snapshot.layers) layers.push_back(stats_of(name, layer));
  const ScaleBounds bounds = bounds_in(range, layers);
  const auto name = [&](int64_t i) { return i < 0 ? "" : layers[static_cast<size_t>(i)].name; };
  return {{"overflow", name(bounds.first_to_overflow)},
          {"doublings", rounded(bounds.doublings_left)},
          {"underflow", name(bounds.first_to_underflow)},
          {"lost", rounded(bounds.lost)},
          {"subnormal", rounded(bounds.subnormal)}};
}

// Adds the heat maps, with the layers that lose most to underflow first, and the bounds of the
// scale.
void add_layers(const History& history, size_t most_columns, ordered_json* run) {
  const std::vector<const LayerSnapshot*> columns = columns_of(history.snapshots, most_columns);
  Points scales;
  for (const LayerSnapshot* snapshot : columns) scales.add(snapshot->step, snapshot->scale);
  (*run)["snapshots"] = {{"steps", scales.steps}, {"scales", scales.values}};
  ordered_json& layers_json = (*run)["layers"] = ordered_json::array();
  if (columns.empty()) return;
  (*run)["bounds"] = bounds_json(range_of(history.settings), *columns.back());

  std::vector<std::pair<std::string, LayerExtremes>> layers(history.extremes.begin(),
                                                            history.extremes.end());
  std::stable_sort(layers.begin(), layers.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.lost, a.second.subnormal) >
           std::pair(b.second.lost, b.second.subnormal);
  });
  for (const auto& [name, worst] : layers) {
    const HistoryLayer& last = layer_in(*columns.back(), name);
    ordered_json layer = {{"name", name},
                          {"lost", rounded(worst.lost)},
                          {"subnormal", rounded(worst.subnormal)},
                          {"zeros", rounded(worst.zeros)},
                          {"top", rounded(last.amax)},
                          {"bad", last.not_finite}};
    layer.update(heat_map(name, columns));
    layers_json.push_back(std::move(layer));
  }
}

// One run, with at most `points` points per curve and `columns` columns per heat map.
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
                      {"planned", planned_steps(history)},
                      {"skipped", history.skipped}};
  const FloatRange& range = range_of(history.settings);
  run["range"] = {{"name", range.name},
                  {"lost", range.lost},
                  {"normal", range.normal},
                  {"overflow", range.overflow},
                  {"largest", range.largest}};
  for (const auto& [key, value] : history.settings) run["settings"].push_back({key, value});
  for (const auto& [key, value] : history.results) run["results"].push_back({key, rounded(value)});
  for (const HistoryNote& note : history.notes) run["notes"].push_back({note.step, note.text});
  run["seconds"] = history.steps.empty() ? 0.0 : history.steps.back().seconds;
  run["rate"] = recent_rate(history.steps);
  const auto loss = [](const HistoryStep& step) { return step.loss; };
  const auto norm = [](const HistoryStep& step) { return step.grad_norm; };
  const std::set<size_t> kept = kept_steps(history.steps, points, loss);
  run["loss"] = curve(history.steps, kept, loss);
  run["norm"] = curve(history.steps, kept_steps(history.steps, points, norm), norm);
  run["scale"] = scale_points(history.steps, points);
  run["skips"] = skip_list(history, kept);
  run["advice"] = diagnosis_json(diagnose_run(history));
  add_layers(history, columns, &run);
  return run;
}

}  // namespace

std::string report_data(const std::string& title, const std::vector<ReportRun>& runs,
                        const std::vector<std::string>& left_out) {
  // Divide the budget of the page among all runs and layers.
  size_t layers = 0;
  for (const ReportRun& run : runs) layers += run.history->extremes.size();
  const size_t columns =
      std::max(kFewestColumns, kMostCells / std::max<size_t>(1, layers * kTypicalRows));
  const size_t points = std::max(kFewestPoints, kMostPoints / std::max<size_t>(1, runs.size()));
  ordered_json data = {{"title", title}, {"left_out", left_out}, {"runs", ordered_json::array()}};
  for (const ReportRun& run : runs) data["runs"].push_back(run_json(run, points, columns));
  return data.dump(-1, ' ', true, ordered_json::error_handler_t::replace);
}

}  // namespace headroom::internal
