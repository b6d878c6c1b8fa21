#include <fmt/format.h>
#include <headroom/headroom.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/suggest.h"
#include "cli/trace.h"

namespace headroom::cli {
namespace {

struct ReplayOptions {
  std::string trace;
  std::vector<std::string> policies = {"dynamic"};
  std::map<std::string, std::string> settings;  // override those of the presets
  bool json = false;
  bool all = false;
};

struct Step {
  int64_t number;
  bool overflow;
  float scale_used;
  float scale;
  Alarm alarm;
  bool retried;    // it overflowed, and its batch is retried
  int64_t values;  // in the step's histogram, if it has one
  int64_t lost;    // of these, how many become 0 in FP16
};

ScalePolicy make_policy(const ReplayOptions& options, const std::string& text) {
  std::string all = text;
  for (const auto& [name, value] : options.settings) {
    all += fmt::format("{}{}={}", all.find(':') == std::string::npos ? ':' : ',', name, value);
  }
  return parse_policy_helpfully(all);
}

std::vector<Step> replay(const ScalePolicy& policy, const std::vector<TraceStep>& trace) {
  std::vector<Step> steps;
  ScaleState state(policy);
  for (size_t i = 0; i < trace.size();) {
    const float used = state.scale();
    const StepSeen seen = trace[i].at(used);
    const Alarm alarm = state.advance(seen);
    const bool retried = state.retry();
    steps.push_back({static_cast<int64_t>(i) + 1, seen.overflow, used, state.scale(), alarm,
                     retried, seen.overflow ? 0 : trace[i].values(),
                     seen.overflow ? 0 : trace[i].lost_at(used)});
    if (!retried) ++i;
  }
  return steps;
}

void print_json(const std::vector<Step>& steps) {
  for (const Step& step : steps) {
    nlohmann::ordered_json object = {{"step", step.number},
                                     {"overflow", step.overflow},
                                     {"scale_used", scale_json(step.scale_used)},
                                     {"scale", scale_json(step.scale)},
                                     {"applied", !step.overflow}};
    if (step.retried) object["retries"] = true;
    print("{}\n", json_text(object));
  }
}

const char* event_of(const Step& step) {
  if (step.retried) return "overflow, retried";
  if (step.alarm == Alarm::kAtFloor) return "skipped, and the scale is at its floor";
  if (step.alarm == Alarm::kSkipsInRow) return "skipped, too many in a row";
  if (step.overflow) return step.scale < step.scale_used ? "skipped, scale cut" : "skipped";
  return step.scale > step.scale_used   ? "scale grown"
         : step.scale < step.scale_used ? "scale cut"
                                        : "";
}

// Prints one row for every step with an event, and one for each range of steps without. With `all`,
// one row for every step.
void print_table(const std::vector<Step>& steps, bool all) {
  print("{:>13}  {:>10}  {:>10}  {:>8}  {}\n", "step", "scale used", "scale after", "applied",
        "what happened");
  for (size_t i = 0; i < steps.size();) {
    size_t end = i + 1;
    if (!all && *event_of(steps[i]) == '\0') {
      while (end < steps.size() && *event_of(steps[end]) == '\0') ++end;
    }
    const Step& first = steps[i];
    const Step& last = steps[end - 1];
    const std::string range = end == i + 1 ? fmt::format("{}", first.number)
                                           : fmt::format("{}-{}", first.number, last.number);
    print("{:>13}  {:>10}  {:>11}  {:>8}  {}\n", range, scale_text(first.scale_used),
          scale_text(last.scale), first.overflow ? "no" : "yes", event_of(first));
    i = end;
  }
}

struct Summary {
  int64_t steps = 0;
  int64_t skipped = 0;
  int64_t retries = 0;
  int64_t values = 0;
  int64_t lost = 0;

  explicit Summary(const std::vector<Step>& passes) {
    for (const Step& step : passes) {
      steps += !step.retried;
      skipped += step.overflow && !step.retried;
      retries += step.retried;
      values = saturating_sum(values, step.values);
      lost = saturating_sum(lost, step.lost);
    }
  }
  double percent_lost() const {
    return values == 0 ? 0.0 : 100.0 * static_cast<double>(lost) / static_cast<double>(values);
  }
};

void print_summary(const std::string& policy, const std::vector<Step>& steps) {
  const Summary sum(steps);
  print("\n{}: {} steps, {} skipped ({:.2f} %)", policy, sum.steps, sum.skipped,
        100.0 * static_cast<double>(sum.skipped) / static_cast<double>(sum.steps));
  if (sum.retries > 0) print(", {} retries", sum.retries);
  print(", final scale {}", scale_text(steps.back().scale));
  if (sum.values > 0) print(", gradients lost {:.4f} %", sum.percent_lost());
  print("\n");
}

// Prints one row per policy.
void print_comparison(const std::vector<std::string>& names,
                      const std::vector<std::vector<Step>>& runs, bool json) {
  if (!json) {
    print("{:<17}{:>8}{:>9}{:>11}{:>13}{:>16}\n", "policy", "steps", "skipped", "retries",
          "final scale", "gradients lost");
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const std::vector<Step>& steps = runs[i];
    const Summary sum(steps);
    if (json) {
      const nlohmann::ordered_json row = {
          {"policy", names[i]},     {"steps", sum.steps},
          {"skipped", sum.skipped}, {"final_scale", scale_json(steps.back().scale)},
          {"values", sum.values},   {"lost", sum.lost},
          {"retries", sum.retries}};
      print("{}\n", json_text(row));
      continue;
    }
    print("{:<17}{:>8}{:>9}{:>11}{:>13}{:>16}\n", names[i], sum.steps, sum.skipped, sum.retries,
          scale_text(steps.back().scale),
          sum.values > 0 ? fmt::format("{:.4f} %", sum.percent_lost()) : "-");
  }
}

// Reports alarms and the largest scale on standard error, so that the output of --json stays clean.
void report_limits(const std::string& name, const ScalePolicy& policy,
                   const std::vector<Step>& steps) {
  int64_t alarms = 0;
  int64_t first_alarm = 0;
  int64_t first_top = 0;
  for (const Step& step : steps) {
    if (!step.retried && step.alarm != Alarm::kNone && alarms++ == 0) first_alarm = step.number;
    if (step.scale == kLargestScale && first_top == 0) first_top = step.number;
  }
  if (alarms > 0) {
    print_error(fmt::format(
        "headroom: {}: {} steps from step {} on raised an alarm: gradients overflowed with the "
        "scale at its floor ({}), or too many times in a row.\n",
        name, alarms, first_alarm, scale_text(policy.min_scale())));
  }
  if (first_top > 0) {
    print_error(fmt::format(
        "headroom: {}: from step {} on the scale is {}, the largest whose reciprocal is a normal "
        "float; it grows no further.\n",
        name, first_top, scale_text(kLargestScale)));
  }
}

int run(const ReplayOptions& options) {
  std::vector<ScalePolicy> policies;
  for (const std::string& name : options.policies) policies.push_back(make_policy(options, name));
  bool cut = false;
  const std::vector<TraceStep> trace = read_trace_file(options.trace, &cut);
  if (trace.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("Trace '{}' has no steps; write one 0 or 1 per line.", options.trace));
  }
  std::vector<std::vector<Step>> runs;
  for (const ScalePolicy& policy : policies) runs.push_back(replay(policy, trace));
  if (runs.size() > 1) {
    print_comparison(options.policies, runs, options.json);
  } else if (options.json) {
    print_json(runs[0]);
  } else {
    print_table(runs[0], options.all);
    print_summary(options.policies[0], runs[0]);
  }
  flush_output();
  if (cut) print_error("headroom: The last line of the history is incomplete and was ignored.\n");
  for (size_t i = 0; i < runs.size(); ++i) {
    report_limits(options.policies[i], policies[i], runs[i]);
  }
  return 0;
}

std::string preset_list() {
  std::string list = "\nPresets:\n";
  for (const PresetInfo& info : presets()) {
    list += fmt::format("  {:<17}{}\n", info.name, info.summary);
  }
  return list;
}

}  // namespace

void add_replay(CLI::App& app, Action* action) {
  auto* command = app.add_subcommand(
      "replay", "Show what a policy does on a recorded run or trace of overflows");
  const auto options = std::make_shared<ReplayOptions>();
  command
      ->add_option("trace", options->trace,
                   "file, or - for standard input: one step per line as 0, 1 (overflow) or a JSON "
                   "object with \"overflow\" or \"amax\"; or the history of a run")
      ->required();
  command
      ->add_option("--policy", options->policies,
                   "a preset, see below; several, separated by commas, are compared")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->default_str("dynamic");
  // Every setting of every rule is an option.
  for (const SettingInfo& info : policy_settings()) {
    std::string flag = "--" + std::string(info.name);
    std::replace(flag.begin(), flag.end(), '_', '-');
    if (command->get_option_no_throw(flag) != nullptr) continue;  // several rules have this setting
    command
        ->add_option_function<std::string>(
            flag,
            [options, name = info.name](const std::string& value) {
              options->settings[name] = value;
            },
            std::string(info.summary) + " (default: the preset's)")
        ->type_name("VALUE");
  }
  command->add_flag("--json", options->json,
                    "one JSON object per step, or per policy if there are several");
  command->add_flag("--all", options->all, "print every step, also those without an event");
  command->footer(preset_list());
  command->callback([action, options] { *action = [options] { return run(*options); }; });
}

}  // namespace headroom::cli
