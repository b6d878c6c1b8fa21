#include "diagnose/rules.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>

#include "decide/headroom_rule.h"
#include "record/text.h"

namespace headroom::internal {
namespace {

constexpr double kFarRoom = 6.0;           // doublings that no policy leaves on purpose
constexpr size_t kManySkips = 5;           // in a row: gradients grew 32 times, not twice
constexpr size_t kBadLosses = 3;           // in a row, until the run ends
constexpr size_t kProofs = 3;              // failures at a scale; a single one may be an outlier
constexpr double kJump = 4.0;              // no policy multiplies the scale by so much in one step
constexpr double kFarBelow = 1024.0;       // a scale that is this much smaller would have helped,
constexpr double kSurelyBelow = 0x1p20;    // even if gradients grew as never before
constexpr double kTinyScale = 0x1p-16;     // at which only infinite gradients overflow
constexpr double kLargestScale = 0x1p126;  // whose reciprocal is a normal FP32 number
constexpr double kHeadroomCeiling = 0x1p32;

const char* const kUseHeadroom = "--loss-scale headroom";
const char* const kUseHeadroomCode = "GradScaler(policy=\"headroom\")";
const char* const kClip = "--clip 1";
const char* const kClipCode = "scaler.step(optimizer, max_norm=1.0)";

std::string count_text(size_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

// A scale as a policy's text has it: "1.15292e+18" would not be a power of two.
std::string scale_value(double scale) {
  char text[64];
  std::snprintf(text, sizeof text, "%.0f", scale);
  return text;
}

// Advice on FP16 names its condition where the precision is not recorded.
std::string if_fp16(const RunFacts& run) {
  return run.precision.empty() ? "If this run trains in FP16 (its precision is not recorded): "
                               : "";
}

bool is_constant(const RunFacts& run) { return run.history.policy.rule == "static"; }

// ---- trouble that no scale cures

// The number of steps at the end of the run whose forward pass has failed. Where the loss is not
// known, gradients that are NaN and not inf count instead, at a scale that has stopped falling: a
// lower one may cure them, also where the scale is constant.
size_t failed_at_end(const RunFacts& run) {
  const bool may_be_high = is_constant(run) && run.last_scale() > 1.0;
  const auto failed = [&](const HistoryStep& step) {
    if (run.has_losses) return run.bad_loss(step);
    return only_nan(step) && step.scale == run.last_scale() && !may_be_high;
  };
  return static_cast<size_t>(std::find_if_not(run.steps.rbegin(), run.steps.rend(), failed) -
                             run.steps.rbegin());
}

// A series of skipped steps that did not end, at scales of which the last should have been small
// enough. Gradients that are NaN and never inf are not the sign of a high scale, unless a first
// scale is being searched, at which backward may overflow inside and multiply inf by 0; others may
// also have grown, or come from a loss that is a large sum.
const SkipStreak* fails_at_any_scale(const RunFacts& run, bool* all_nan) {
  if (run.streaks.empty() || !run.streaks.back().open) return nullptr;
  const SkipStreak& streak = run.streaks.back();
  const auto first = run.steps.begin() + static_cast<std::ptrdiff_t>(streak.begin);
  const double last = run.last_scale();
  *all_nan = std::all_of(first, run.steps.end(), only_nan);
  const bool had_settled = streak.begin >= run.settled;
  if (*all_nan) {
    return first->scale >= kFarBelow * last && (had_settled || last <= 1.0) ? &streak : nullptr;
  }
  const bool fell = had_settled ? first->scale >= kSurelyBelow * last : last <= kTinyScale;
  return fell ? &streak : nullptr;
}

std::optional<Finding> forward_overflow(const RunFacts& run) {
  Finding finding;
  const size_t length = failed_at_end(run);
  bool all_nan = false;
  const SkipStreak* const failing = fails_at_any_scale(run, &all_nan);
  if (length >= kBadLosses) {
    const HistoryStep& first = run.steps[run.steps.size() - length];
    finding.problem =
        std::string(run.has_losses ? "The loss was inf or NaN"
                                   : "The gradients were NaN, none of them inf,") +
        " in the last " + count_text(length, "step") + ", from step " + std::to_string(first.step) +
        " on" +
        (first.scale > run.last_scale() ? ", at every scale from " + scale_text(first.scale) +
                                              " down to " + scale_text(run.last_scale())
                                        : "") +
        ": the forward pass has failed, which no loss scale changes.";
  } else if (failing != nullptr) {
    finding.problem = "From step " + std::to_string(run.steps[failing->begin].step) +
                      " on the gradients were " + (all_nan ? "NaN" : "inf or NaN") +
                      " at every scale from " + scale_text(run.steps[failing->begin].scale) +
                      " down to " + scale_text(run.last_scale()) + ": no loss scale cures that.";
  } else {
    return std::nullopt;
  }
  if (run.narrow()) {
    finding.change =
        "Find the first operation that leaves FP16's range with the range watch, and keep its "
        "module in FP32, or train in BF16; if the loss had been rising, lower the learning rate "
        "first.";
    finding.command = "--precision bf16";
    finding.code = "watch = headroom.torch.watch(model)  # later: print(watch.report())";
  } else {
    finding.change =
        "Lower the learning rate, and look for a division by 0 or a logarithm of 0; the range "
        "watch names the first operation that fails.";
    finding.command = kClip;
    finding.code = "watch = headroom.torch.watch(model)  # later: print(watch.report())";
  }
  return finding;
}

std::optional<Finding> same_step(const RunFacts& run) {
  for (const HistoryStep& step : run.steps) {
    const auto is_bad = [&](const HistoryStep& tried) {
      return tried.step == step.step && !tried.applied && (run.bad_loss(tried) || only_nan(tried));
    };
    if (!is_bad(step)) continue;
    size_t attempts = 1, failed = 1;
    for (const DroppedAttempt& attempt : run.history.dropped) {
      attempts += attempt.reached >= step.step;
      failed += std::any_of(attempt.bad_batches.begin(), attempt.bad_batches.end(), is_bad);
    }
    if (failed < 2 || failed < attempts) continue;
    const std::string at = std::to_string(step.step);
    Finding finding;
    finding.problem = "Step " + at + " gave NaN in all " + count_text(attempts, "attempt") +
                      " to train it: its batch is bad, not the scale.";
    finding.change = "Look at the data of step " + at +
                     ", and leave out samples that are not finite or have no valid target.";
    finding.code = "assert torch.isfinite(batch).all()";
    return finding;
  }
  return std::nullopt;
}

std::optional<Finding> bad_batches(const RunFacts& run) {
  std::vector<std::string> at;
  bool lowered = false;
  for (const SkipStreak& streak : run.streaks) {
    if (streak.begin < run.settled || streak.length() >= kManySkips) continue;
    for (size_t i = streak.begin; i < streak.end; ++i) {
      if (!run.blames_batch(i)) continue;
      at.push_back(std::to_string(run.steps[i].step));
      lowered =
          lowered || (i + 1 < run.steps.size() && run.steps[i + 1].scale < run.steps[i].scale);
    }
  }
  if (at.size() < 5 || 200 * at.size() < run.steps.size()) return std::nullopt;
  Finding finding;
  finding.problem = std::to_string(at.size()) + " of " + count_text(run.steps.size(), "step") +
                    " gave NaN at a scale that was not too high (steps " + at[0] + ", " + at[1] +
                    ", " + at[2] + ", ...): their batches are bad" +
                    (lowered ? ", and lower the scale." : ".");
  finding.change =
      "Look at the data of these steps, and leave out samples that are not finite or have no valid "
      "target. If the data are good, the range watch names the operation that fails.";
  finding.code = "assert torch.isfinite(batch).all()";
  return finding;
}

// ---- the scale and its bounds

std::optional<Finding> at_floor(const RunFacts& run) {
  if (!run.narrow() || run.streaks.empty()) return std::nullopt;
  const bool constant = is_constant(run);
  const double floor = constant ? run.last_scale() : run.history.policy.min_scale;
  if (!(floor > 0.0)) return std::nullopt;
  // A step that is followed by one at a far higher scale had a bad batch. At a constant scale NaN
  // alone may be overflow, too, since inf x 0 is NaN.
  size_t skipped = 0, with_inf = 0;
  double next_applied = 0.0;
  for (size_t i = run.steps.size(); i-- > 0;) {
    const HistoryStep& step = run.steps[i];
    if (step.applied) next_applied = step.scale;
    if (step.applied || step.scale > floor || next_applied >= kFarBelow * floor) continue;
    const bool nan = constant && floor > 1.0 && only_nan(step) && !run.blames_batch(i);
    if ((!step.has_inf && !nan) || run.bad_loss(step)) continue;
    ++skipped;
    with_inf += step.has_inf;
  }
  const bool often = static_cast<double>(skipped) >= 0.02 * static_cast<double>(run.steps.size());
  const SkipStreak& end = run.streaks.back();
  const bool stopped = end.open && skipped > 0 && run.last_scale() <= floor &&
                       (!constant || end.length() >= kManySkips);
  if (!stopped && (skipped < 3 || !often)) return std::nullopt;
  Finding finding;
  finding.problem =
      if_fp16(run) + count_text(skipped, "step") +
      (with_inf > 0 ? " overflowed at scale " : " gave NaN at scale ") + scale_text(floor) +
      (constant ? ", which is constant" : ", the policy's floor") +
      (with_inf > 0 ? ": the scale would have to be smaller." : ": it may be too high.");
  const double settled = run.settled < run.steps.size() ? run.steps[run.settled].scale : floor;
  if (settled >= kFarBelow * floor) {
    finding.problem += " It had settled at " + scale_text(settled) + ": the gradients have grown.";
    finding.change =
        "Lower the learning rate and clip the gradients: a smaller min_scale would only keep the "
        "run alive a little longer.";
    finding.command = kClip;
    finding.code = kClipCode;
    return finding;
  }
  finding.change = constant ? "Let the scale follow the gradients."
                            : "Use the policy whose floor is 2^-24, or a smaller min_scale.";
  finding.command = kUseHeadroom;
  finding.code = kUseHeadroomCode;
  return finding;
}

// Whether a series of skipped steps begins with a scale that no policy chose: the scaler has
// started anew, as after a resume without its state.
bool starts_anew(const RunFacts& run, const SkipStreak& streak) {
  return streak.begin > 0 &&
         run.steps[streak.begin].scale >= kJump * run.steps[streak.begin - 1].scale;
}

// The longest series of skipped steps after warm-up; null if none is long.
const SkipStreak* longest_streak(const RunFacts& run, bool anew) {
  const auto hysteresis = static_cast<size_t>(std::clamp(run.history.policy.hysteresis, 1.0, 1e6));
  size_t most = kManySkips * hysteresis - 1;
  const SkipStreak* longest = nullptr;
  for (const SkipStreak& streak : run.streaks) {
    if (streak.begin < run.settled || starts_anew(run, streak) != anew) continue;
    if (streak.length() <= most) continue;
    most = streak.length();
    longest = &streak;
  }
  return longest;
}

std::optional<Finding> forgotten_scale(const RunFacts& run, const SkipStreak& streak) {
  Finding finding;
  std::string steps = steps_text(run, streak);
  steps[0] = 'S';
  finding.problem = steps + " were skipped in a row, because the scale had jumped from " +
                    scale_text(run.steps[streak.begin - 1].scale) + " to " +
                    scale_text(run.steps[streak.begin].scale) +
                    ": the scaler had lost its state and searched for its scale again.";
  finding.change = "Save the scaler's state in each checkpoint, and load it when you resume.";
  finding.code = "scaler.load_state_dict(checkpoint[\"scaler\"])";
  return finding;
}

std::optional<Finding> skips_in_row(const RunFacts& run) {
  const SkipStreak* const longest = longest_streak(run, false);
  if (longest == nullptr) {
    const SkipStreak* const search = longest_streak(run, true);
    return search == nullptr ? std::nullopt : forgotten_scale(run, *search);
  }
  Finding finding;
  std::string steps = steps_text(run, *longest);
  steps[0] = 'S';
  const double first = run.steps[longest->begin].scale, last = run.steps[longest->end - 1].scale;
  finding.problem =
      steps + " were skipped in a row, after the scale had settled at " + scale_text(first) +
      (last < first ? ", and lowering it to " + scale_text(last) + " did not help." : ".");
  finding.change = "Clip the gradients, and lower the learning rate or lengthen its warm-up.";
  finding.command = kClip;
  finding.code = kClipCode;
  return finding;
}

// Whether the scale has reached the policy's ceiling and stayed there.
bool stays_at_ceiling(const RunFacts& run) {
  const double ceiling = run.history.policy.max_scale;
  if (!(ceiling > 0.0) || run.recent >= run.steps.size()) return false;
  size_t there = 0;
  for (size_t i = run.recent; i < run.steps.size(); ++i) there += run.steps[i].scale >= ceiling;
  return 2 * there > run.steps.size() - run.recent;
}

std::optional<Finding> at_ceiling(const RunFacts& run) {
  if (!run.narrow() || !stays_at_ceiling(run)) return std::nullopt;
  if (run.room.value_or(0.0) < kMuchRoom || !run.underflows()) return std::nullopt;
  const double ceiling = run.history.policy.max_scale;
  const bool own = run.history.policy.rule == "headroom";
  const double wanted =
      std::min(kLargestScale, std::exp2(std::floor(std::log2(ceiling) + *run.room - 2.0)));
  if (wanted <= ceiling) return std::nullopt;
  Finding finding;
  finding.problem = if_fp16(run) + "The scale stays at " + scale_text(ceiling) +
                    ", the policy's ceiling, although " + run.underflow_text() +
                    " and there is room for " + doublings_text(*run.room) + ".";
  finding.change =
      own ? "Raise max_scale." : "Use a policy with a higher ceiling, or raise max_scale.";
  finding.command = own ? "--loss-scale headroom:max_scale=" + scale_value(wanted) : kUseHeadroom;
  finding.code = own ? "GradScaler(policy=\"headroom:max_scale=" + scale_value(wanted) + "\")"
                     : kUseHeadroomCode;
  return finding;
}

// The policy that raises the scale of this run. HeadroomScale follows the gradients at once up to
// 2^16 and slowly above it; a run that is too short for that has to start higher.
std::string raising_policy(const RunFacts& run) {
  constexpr double kHighest = 31.0;
  const double target = std::floor(std::log2(run.last_scale()) + *run.room - kMuchRoom);
  int64_t steps = 0;
  for (int32_t exponent = internal::kUsualExponent; exponent < target; ++exponent) {
    steps += internal::steps_to_grow({}, exponent);
  }
  if (steps <= static_cast<int64_t>(run.steps.size())) return "headroom";
  return "headroom:init_scale=" + scale_value(std::exp2(std::min(target, kHighest)));
}

std::optional<Finding> scale_too_low(const RunFacts& run) {
  const bool fp16 = run.precision == "fp16" || (run.precision.empty() && run.scales());
  if (!fp16 || run.room.value_or(0.0) < kMuchRoom || !run.underflows()) return std::nullopt;
  if (run.last_scale() >= kHeadroomCeiling) return std::nullopt;  // it would lower the scale
  const std::string policy = raising_policy(run);
  // A short distance is left by HeadroomScale on purpose.
  if (run.history.policy.rule == "headroom" && (policy == "headroom" || *run.room < kFarRoom)) {
    return std::nullopt;
  }
  Finding finding;
  finding.problem =
      if_fp16(run) +
      (run.scales() ? "at scale " + scale_text(run.last_scale()) + " " : "without a loss scale ") +
      run.underflow_text() + ", and there is room for " + doublings_text(*run.room) +
      " of the scale.";
  finding.problem[0] = static_cast<char>(std::toupper(finding.problem[0]));
  finding.change = policy == "headroom"
                       ? "Let the scale follow the largest gradient."
                       : "Let the scale follow the largest gradient, and begin higher: this run is "
                         "too short to find the scale.";
  finding.command = "--loss-scale " + policy;
  finding.code = "GradScaler(policy=\"" + policy + "\")";
  return finding;
}

// Whether the scale is as high as the gradients allow. HeadroomScale keeps a distance of its own.
bool no_room(const RunFacts& run) {
  if (run.failed_at_bound > 0 && run.failed_at_bound < kProofs) return false;
  return run.room.has_value() && *run.room < (run.history.policy.rule == "headroom" ? 5.0 : 3.0);
}

// ---- the gradients need more range than FP16 has

std::optional<Finding> one_tensor(const RunFacts& run) {
  if (!run.narrow() || !run.scales() || !no_room(run) || !run.top.has_value()) return std::nullopt;
  const TopTensor& top = *run.top;
  const bool others_suffer =
      top.others.lost >= 0.05 || top.others.lost + top.others.subnormal >= 0.4;
  if (top.ahead < 4.0 || !others_suffer) return std::nullopt;
  const size_t dot = top.name.find_last_of('.');
  const bool in_module = dot != std::string::npos;  // parameters of the model itself are in none
  const std::string module = in_module ? top.name.substr(0, dot) : top.name;
  Finding finding;
  finding.problem = if_fp16(run) + "The gradients of " + top.name + " are at least " +
                    doublings_text(top.ahead) +
                    " larger than those of every other tensor and bound the scale for all, while " +
                    share_text(top.others.lost + top.others.subnormal) +
                    " of the others' nonzero gradients are lost or subnormal.";
  finding.change = "Compute " + module + " in FP32, so that the scale can rise.";
  if (in_module) finding.code = "headroom.torch.keep_fp32(model, " + quoted_list({module}) + ")";
  return finding;
}

// Gradients that are computed in FP32, as those of embeddings often are, are not lost, although
// they lie where FP16 loses them; so this rule wants more of them than underflows() does.
std::optional<Finding> no_scale_left(const RunFacts& run) {
  if (!run.narrow() || !run.scales() || !no_room(run) || !run.loss.has_value()) return std::nullopt;
  const double casts = run.cast_to_zero.value_or(0.0);
  const bool much = run.loss->lost >= 0.05 || run.loss->lost + run.loss->subnormal >= 0.4;
  if (!much && casts < 0.05) return std::nullopt;
  Finding finding;
  finding.problem = if_fp16(run) +
                    "The scale is as high as the largest gradients allow (room for " +
                    doublings_text(*run.room) + "), and still " + run.underflow_text() +
                    ": the gradients need more range than FP16 has.";
  finding.change = "Train in BF16, or keep the layers that lose most in FP32.";
  finding.command = "--precision bf16";
  finding.code = "torch.autocast(device, dtype=torch.bfloat16)";
  return finding;
}

// ---- waste

std::optional<Finding> growth_fails(const RunFacts& run) {
  size_t grown = 0, failed = 0;
  for (size_t i = std::max<size_t>(run.settled, 1); i < run.steps.size(); ++i) {
    if (run.steps[i].scale <= run.steps[i - 1].scale) continue;
    ++grown;
    const size_t end = std::min(i + 2, run.steps.size());
    bool fails = false;
    for (size_t j = i; j < end; ++j)
      fails = fails || (!run.steps[j].applied && !run.blames_batch(j));
    failed += fails;
  }
  const double cost = static_cast<double>(failed) / static_cast<double>(run.steps.size());
  if (failed < 5 || 2 * failed < grown || cost < 0.02) return std::nullopt;
  Finding finding;
  finding.problem = std::to_string(failed) + " of " + count_text(grown, "attempt") +
                    " to raise the scale overflowed within two steps, and cost " +
                    share_text(cost) + " of all steps.";
  finding.change =
      "Use the policy that follows the largest gradient and does not have to try, or a "
      "growth_interval of 1000 or more.";
  finding.command = kUseHeadroom;
  finding.code = kUseHeadroomCode;
  return finding;
}

std::optional<Finding> no_scaler_needed(const RunFacts& run) {
  // A run may have begun in FP16: only the steps in its present precision count.
  const auto first = run.steps.begin() + static_cast<std::ptrdiff_t>(run.history.settings_from);
  const bool scales = std::any_of(first, run.steps.end(),
                                  [](const HistoryStep& step) { return step.scale != 1.0; });
  if (run.narrow() || !scales) return std::nullopt;
  const auto skipped = static_cast<size_t>(
      std::count_if(first, run.steps.end(), [](const HistoryStep& step) { return !step.applied; }));
  Finding finding;
  finding.problem = std::string(run.precision == "bf16" ? "BF16" : "FP32") +
                    " has the range of FP32, and this run scales its loss by " +
                    scale_text(run.last_scale()) + ", which gains nothing" +
                    (skipped > 0 ? " and cost " + count_text(skipped, "step") : "") + ".";
  finding.change = "Train without a loss scale.";
  finding.command = "--loss-scale none";
  finding.code = "GradScaler(enabled=False)";
  return finding;
}

}  // namespace

const std::vector<Rule>& rules() {
  static const std::vector<Rule> list = {
      {{"forward-overflow",
        "the loss is inf or NaN in the last 3 steps or more; or every step until the run ends "
        "overflows while the scale falls to a millionth (from the start of a run to 2^-16; if all "
        "bad gradients are NaN, to a thousandth, and from the start of a run to 1)",
        "the range watch and FP32 for the module it names, or BF16; no loss scale helps"},
       forward_overflow,
       {"bad-batches", "skips-in-row", "at-floor"}},
      {{"same-step", "the same step gives NaN before and after every resume",
        "inspect the data of that step"},
       same_step,
       {"bad-batches"}},
      {{"bad-batches",
        "5 steps and 0.5 % of all gave a loss that is inf or NaN, or gradients that are NaN, not "
        "inf, at a scale with room for 3 doublings that one of the 64 steps before had; fewer than "
        "5 of them in a row",
        "inspect the data of those steps"},
       bad_batches},
      {{"at-floor",
        "gradients overflow at the smallest scale of the policy: the last step does, or 3 steps "
        "and 2 % of all are skipped; also at a static scale, if the last 5 steps are, and with NaN "
        "only, which may be overflow inside backward",
        "`--loss-scale headroom`, with a floor of 2^-24; clipping if the scale fell by 2^10"},
       at_floor,
       {"skips-in-row"}},
      {{"skips-in-row",
        "5 steps in a row are skipped (times `hysteresis`), over 10 steps after the first applied",
        "clip the gradients, lower the learning rate; if the scale jumped up before, save the "
        "scaler's state"},
       skips_in_row},
      {{"at-ceiling",
        "the scale stays at `max_scale`, gradients underflow, and there is room for 3 doublings",
        "`--loss-scale headroom`, whose ceiling is 2^32, or a larger `max_scale`"},
       at_ceiling,
       {"scale-too-low"}},
      {{"scale-too-low", "gradients underflow, and there is room for 3 doublings",
        "`--loss-scale headroom`, in a short run with a higher `init_scale`"},
       scale_too_low},
      {{"one-tensor",
        "as `no-scale-left`, and one tensor's gradients are 16 times larger than all others",
        "compute that tensor's module in FP32"},
       one_tensor,
       {"no-scale-left"}},
      {{"no-scale-left",
        "less room than for 3 doublings (5 with the policy `headroom`) is left, and FP16 makes 5 % "
        "of the nonzero gradients zero, or 40 % zero or subnormal",
        "BF16, or FP32 for the layers that lose most"},
       no_scale_left},
      {{"growth-fails",
        "5 attempts to raise the scale, at least half of them, overflow within two steps and cost "
        "2 % of all steps",
        "`--loss-scale headroom`, or a `growth_interval` of 1000 or more"},
       growth_fails},
      {{"no-scaler-needed", "a BF16 or FP32 run has a loss scale other than 1",
        "`--loss-scale none`"},
       no_scaler_needed},
  };
  return list;
}

}  // namespace headroom::internal
