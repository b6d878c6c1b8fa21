#include "cli/train/watch.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <optional>

#include "cli/output.h"
#include "cli/serve.h"
#include "cli/train/checkpoint.h"

namespace headroom::cli {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGHUP};

// A second SIGINT kills the process. A second SIGHUP does not: when a terminal is closed, both the
// terminal and its shell send one, and the checkpoint must still be written.
void request_stop(int signal) {
  stop_requested = 1;
  if (signal != SIGHUP) std::signal(signal, SIG_DFL);
}

void (*handler_of(int signal))(int) {
  struct sigaction now {};
  sigaction(signal, nullptr, &now);
  return now.sa_handler;
}

// The settings as the history names them: {"opt_level", "O1"}.
std::vector<std::pair<std::string, std::string>> named_settings(const TrainConfig& config) {
  auto settings = settings_of(config);
  for (auto& [name, value] : settings) {
    if (value.empty()) value = name == "--data" ? "built in" : "no";
    name = name.substr(2);
    std::replace(name.begin(), name.end(), '-', '_');
  }
  return settings;
}

Scalars results_of(const RunResult& result) {
  Scalars results = {{"final_loss", result.score.loss},
                     {result.metric_name, result.score.metric},
                     {"final_scale", result.final_scale}};
  if (result.lost.values > 0) {
    results.emplace_back("gradients_lost", static_cast<double>(result.lost.zeroed) /
                                               static_cast<double>(result.lost.values));
  }
  if (result.retries > 0) {
    results.emplace_back("retries", static_cast<double>(result.retries));
  }
  return results;
}

std::string end_of(const RunResult& result) {
  if (!result.alarm.empty()) return "stopped: " + result.alarm;
  return result.interrupted ? "stopped by hand" : "finished";
}

}  // namespace

Interrupt::Interrupt() {
  stop_requested = 0;
  for (const int signal : kStopSignals) {
    const bool nohup = signal == SIGHUP && handler_of(signal) == SIG_IGN;
    if (!nohup) std::signal(signal, request_stop);
  }
}

Interrupt::~Interrupt() {
  for (const int signal : kStopSignals) {
    if (handler_of(signal) == request_stop) std::signal(signal, SIG_DFL);
  }
}

bool Interrupt::requested() { return stop_requested != 0; }

Progress::Progress(std::string name, int64_t steps)
    : name_(std::move(name)), steps_(steps), terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::show(const StepRecord& record, const RunResult& so_far) {
  const auto now = std::chrono::steady_clock::now();
  const bool end = record.step == steps_;
  const auto wait = terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(5);
  if (!end && now - last_ < wait) return;
  last_ = now;
  const double rate = static_cast<double>(record.step) / record.seconds;
  const double left = static_cast<double>(steps_ - record.step) / rate;
  const std::string facts = fmt::format(
      "{}/{} loss {:.4g} scale {} skipped {} {:.3g} steps/s {} left", record.step, steps_,
      record.loss, scale_number(record.scale), so_far.skipped, rate, duration(left));
  if (!terminal_) {
    print_error(fmt::format("{}: {}\n", name_, facts));
    return;
  }
  const int width = terminal_width(STDERR_FILENO);
  const int room = width - static_cast<int>(name_.size() + facts.size()) - 5;
  std::string line =
      name_ + " " +
      progress_bar(room, static_cast<double>(record.step) / static_cast<double>(steps_));
  line += facts;
  redraw(line.substr(0, static_cast<size_t>(width - 1)));
}

void Progress::finish() {
  if (terminal_) redraw("");
}

RunResult run_with_progress(const TrainConfig& config, Task& task, const RunInfo& info,
                            const std::string& folder, RunContext context) {
  const bool first = config.part.rank == 0;
  Checkpoints* const checkpoints = context.checkpoints;
  std::optional<LiveReport> live;
  if (config.watch && first) live.emplace(config.port);
  if (checkpoints != nullptr && !config.resume) checkpoints->begin(config);
  std::optional<Recorder> recorder;
  if (!folder.empty() && first) {
    RunInfo run_info = info;
    run_info.policy = config.policy();
    run_info.settings = named_settings(config);
    run_info.tensorboard = config.tensorboard;
    run_info.resume = config.resume;
    recorder.emplace(folder, run_info);
    context.recorder = &*recorder;
  }
  if (live.has_value()) {
    live->start(folder);
    print_error(fmt::format("Watch at {}\n", live->url()));
  }
  std::optional<Progress> progress;
  if (first) {
    progress.emplace(info.group.empty() ? info.name : info.group + ": " + info.name, config.steps);
  }
  const auto on_step = [&](const StepRecord& record, const RunResult& so_far) {
    if (progress.has_value()) progress->show(record, so_far);
    return !Interrupt::requested();
  };
  RunResult result = run(config, task, context, on_step);
  const bool escapes = !result.alarm.empty() && checkpoints != nullptr && !config.escape.empty() &&
                       config.escape != config.precision;
  if (escapes) {
    const std::string why =
        fmt::format("switching from {} to {} because of step {}. {}", config.precision,
                    config.escape, result.steps.back().step, result.alarm);
    if (first) print_error(fmt::format("headroom: {}\n", why));
    checkpoints->escape(config.escape);
    const TrainConfig other = in_precision(config, config.escape);
    const auto fresh = make_task(other);
    if (recorder.has_value()) recorder->settings(named_settings(other));
    result = run(other, *fresh, context, on_step, why);
    result.escaped = why;
  }
  if (progress.has_value()) progress->finish();
  if (recorder.has_value()) {
    try {
      recorder->finish(results_of(result), end_of(result));
    } catch (const Error& error) {  // the caller still reports how the run ended
      if (result.not_saved.empty()) result.not_saved = error.what();
    }
  }
  return result;
}

}  // namespace headroom::cli
