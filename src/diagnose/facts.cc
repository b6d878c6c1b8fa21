#include "diagnose/facts.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "inspect/numbers.h"
#include "record/float_range.h"

namespace headroom::internal {
namespace {

constexpr size_t kWarmUp = 10;  // steps after the first applied one

// NaN gradients explain a loss that is NaN. Older loops apply steps with such gradients.
bool has_nan_gradients(const HistoryStep& step) {
  return step.applied ? !std::isfinite(step.grad_norm) || !std::isfinite(step.amax) : step.has_nan;
}

std::vector<SkipStreak> streaks_of(const std::vector<HistoryStep>& steps) {
  std::vector<SkipStreak> streaks;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!overflowed(steps[i])) continue;
    if (streaks.empty() || streaks.back().end != i) streaks.push_back({i, i, false});
    streaks.back().end = i + 1;
  }
  if (!streaks.empty()) streaks.back().open = streaks.back().end == steps.size();
  return streaks;
}

// The recent records of layers; the last two if there are fewer.
std::vector<const LayerSnapshot*> recent_snapshots(const History& history, int64_t from_step) {
  std::vector<const LayerSnapshot*> recent;
  const size_t count = history.snapshots.size();
  for (size_t i = 0; i < count; ++i) {
    const LayerSnapshot& snapshot = history.snapshots[i];
    if (snapshot.step >= from_step || i + 2 >= count) recent.push_back(&snapshot);
  }
  return recent;
}

// The loss over all tensors but `without`.
std::optional<RangeLoss> loss_of(const std::vector<const LayerSnapshot*>& snapshots,
                                 const std::string& without = "") {
  int64_t lost = 0, subnormal = 0, nonzero = 0;
  for (const LayerSnapshot* snapshot : snapshots) {
    for (const auto& [name, layer] : snapshot->layers) {
      if (!without.empty() && name == without) continue;
      const Fp16Zones zones = zones_of(layer);
      lost += zones.lost;
      subnormal += zones.subnormal;
      nonzero += zones.lost + zones.subnormal + zones.normal + zones.overflow;
    }
  }
  if (nonzero == 0) return std::nullopt;
  return RangeLoss{share(lost, nonzero), share(subnormal, nonzero)};
}

std::optional<TopTensor> top_of(const std::vector<const LayerSnapshot*>& snapshots) {
  std::map<std::string, size_t> times;
  for (const LayerSnapshot* snapshot : snapshots) ++times[snapshot->first_to_overflow];
  const auto most = std::max_element(
      times.begin(), times.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most == times.end() || most->first.empty() || snapshots.size() < 2) return std::nullopt;
  if (static_cast<double>(most->second) < 0.8 * static_cast<double>(snapshots.size())) {
    return std::nullopt;
  }
  TopTensor top = {most->first, HUGE_VAL, {}};
  for (const LayerSnapshot* snapshot : snapshots) {
    if (snapshot->first_to_overflow != top.name || snapshot->layers.size() < 2) continue;
    double own = 0.0, other = 0.0;
    for (const auto& [name, layer] : snapshot->layers) {
      if (layer.not_finite > 0) continue;  // its largest gradient is not known
      double& largest = name == top.name ? own : other;
      largest = std::max(largest, layer.amax);
    }
    if (own > 0.0 && other > 0.0) top.ahead = std::min(top.ahead, std::log2(own / other));
  }
  if (!std::isfinite(top.ahead)) return std::nullopt;
  top.others = loss_of(snapshots, top.name).value_or(RangeLoss{});
  return top;
}

}  // namespace

RunFacts::RunFacts(const History& run)
    : history(run),
      steps(run.steps),
      precision(precision_of(run.settings)),
      streaks(streaks_of(run.steps)) {
  const auto first = std::find_if(steps.begin(), steps.end(),
                                  [](const HistoryStep& step) { return step.applied; });
  settled = std::min(static_cast<size_t>(first - steps.begin()) + kWarmUp, steps.size());
  recent = settled + (steps.size() - settled) / 2;
  applied = steps.size() - static_cast<size_t>(run.skipped);
  has_losses = std::any_of(steps.begin(), steps.end(),
                           [](const HistoryStep& step) { return std::isfinite(step.loss); }) &&
               std::none_of(steps.begin(), steps.end(), [](const HistoryStep& step) {
                 return std::isnan(step.loss) && step.applied && !has_nan_gradients(step);
               });
  find_room();
  const int64_t from_step = recent < steps.size() ? steps[recent].step : 0;
  const std::vector<const LayerSnapshot*> snapshots = recent_snapshots(run, from_step);
  loss = loss_of(snapshots);
  top = top_of(snapshots);
  for (const auto& [name, value] : run.results) {
    if (name == "gradients_lost" && std::isfinite(value)) cast_to_zero = value;
  }
}

void RunFacts::find_room() {
  double largest = 0.0;  // unscaled
  double applied_later = 0.0, bound = HUGE_VAL;
  for (size_t i = steps.size(); i-- > recent;) {
    const HistoryStep& step = steps[i];
    if (step.applied) {
      applied_later = std::max(applied_later, step.scale);
      if (std::isfinite(step.amax)) largest = std::max(largest, step.amax);
    } else if (overflowed(step) && step.scale > applied_later && !blames_batch(i)) {
      bound = std::min(bound, step.scale);
    }
  }
  if (!(largest > 0.0)) return;
  room = std::max(std::log2(kLargestF16 / largest / last_scale()), 0.0);
  // At the scale that failed, a gradient was at least kRoundsToInfF16.
  const double until_bound = std::log2(kLargestF16 / kRoundsToInfF16 * bound / last_scale());
  if (until_bound >= *room) return;
  room = std::max(until_bound, 0.0);
  failed_at_bound = static_cast<size_t>(std::count_if(
      steps.begin() + static_cast<std::ptrdiff_t>(recent), steps.end(),
      [&](const HistoryStep& step) { return overflowed(step) && step.scale == bound; }));
}

// NaN without a NaN gradient is not the loss of this step: the loop does not know it.
bool RunFacts::bad_loss(const HistoryStep& step) const {
  if (!has_losses || std::isfinite(step.loss)) return false;
  return std::isinf(step.loss) || has_nan_gradients(step);
}

bool RunFacts::blames_batch(size_t index) const {
  const HistoryStep& step = steps[index];
  size_t before = index;
  while (before > 0 && !steps[before - 1].applied) --before;
  if (before == 0) return false;
  if (bad_loss(step)) return true;  // whatever the scale
  if (!only_nan(step) || before != index || !was_applied_at(step.scale, index)) return false;
  const double largest = steps[before - 1].amax * step.scale;
  return largest > 0.0 && std::log2(kLargestF16 / largest) >= kMuchRoom;
}

bool RunFacts::was_applied_at(double scale, size_t index) const {
  constexpr size_t kRemembered = 64;
  const auto end = steps.begin() + static_cast<std::ptrdiff_t>(index);
  const auto begin = end - static_cast<std::ptrdiff_t>(std::min(index, kRemembered));
  return std::any_of(begin, end,
                     [&](const HistoryStep& step) { return step.applied && step.scale >= scale; });
}

bool RunFacts::scales() const {
  return std::any_of(steps.begin(), steps.end(),
                     [](const HistoryStep& step) { return step.scale != 1.0; });
}

// A value that lost a few of its bits still points in the right direction, so only large shares of
// subnormal values count.
bool RunFacts::underflows() const {
  const RangeLoss range = loss.value_or(RangeLoss{});
  return range.lost >= 0.01 || range.lost + range.subnormal >= 0.25 ||
         cast_to_zero.value_or(0.0) >= 0.01;
}

std::string RunFacts::underflow_text() const {
  const RangeLoss range = loss.value_or(RangeLoss{});
  const double casts = cast_to_zero.value_or(0.0);
  std::string text;
  if (casts >= 0.001) {
    text = "casts to FP16 make " + share_text(casts) + " of the values zero";
  } else if (range.lost > 0.0) {
    text = "FP16 makes " + share_text(range.lost) + " of the nonzero gradients zero";
  }
  if (range.subnormal == 0.0) return text;
  return text + (text.empty() ? "" : " and ") + share_text(range.subnormal) +
         (text.empty() ? " of the nonzero gradients are subnormal in FP16"
                       : " of the remaining gradients are subnormal");
}

bool overflowed(const HistoryStep& step) { return !step.applied && (step.has_inf || step.has_nan); }

bool only_nan(const HistoryStep& step) { return !step.applied && step.has_nan && !step.has_inf; }

std::string scale_text(double scale) {
  int exponent = 0;
  if (scale >= 4.0 && std::frexp(scale, &exponent) == 0.5)
    return "2^" + std::to_string(exponent - 1);
  if (scale < 0.25 && std::frexp(scale, &exponent) == 0.5)
    return "2^" + std::to_string(exponent - 1);
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", scale);
  return text;
}

std::string doublings_text(double doublings) {
  const auto whole = static_cast<int64_t>(std::floor(std::max(doublings, 0.0)));
  return std::to_string(whole) + (whole == 1 ? " doubling" : " doublings");
}

std::string share_text(double share) {
  char text[32];
  std::snprintf(text, sizeof text, share >= 0.999 && share < 1.0 ? "%.2f %%" : "%.3g %%",
                100.0 * share);
  return text;
}

std::string steps_text(const RunFacts& run, const SkipStreak& streak) {
  const int64_t first = run.steps[streak.begin].step;
  const int64_t last = run.steps[streak.end - 1].step;
  return first == last ? "step " + std::to_string(first)
                       : "steps " + std::to_string(first) + " to " + std::to_string(last);
}

}  // namespace headroom::internal
