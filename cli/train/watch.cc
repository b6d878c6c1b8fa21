#include "cli/train/watch.h"

#include <fmt/format.h>
#include <headroom/error.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace headroom::cli {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int signal) {
  stop_requested = 1;
  std::signal(signal, SIG_DFL);
}

std::string duration(double seconds) {
  if (!(seconds < 1e8)) return "?";
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
}

int terminal_width() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

nlohmann::ordered_json step_json(const StepRecord& record) {
  nlohmann::ordered_json line = {{"step", record.step},           {"loss", record.loss},
                                 {"scale", record.scale},         {"overflow", !record.applied},
                                 {"grad_norm", record.grad_norm}, {"lr", record.lr},
                                 {"seconds", record.seconds}};
  if (record.applied) {
    line["amax"] = record.amax;
  } else {
    line["overflow_at"] = record.scale;
    line["culprit"] = record.culprit;
  }
  for (size_t i = 0; i < record.histogram.size(); ++i) {
    if (record.histogram[i] == 0) continue;
    const int exponent = GradDetail::kMinExponent + static_cast<int>(i);
    line["log2"][std::to_string(exponent)] = record.histogram[i];
  }
  return line;
}

}  // namespace

Interrupt::Interrupt() {
  stop_requested = 0;
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
}

Interrupt::~Interrupt() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
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
  const std::string facts =
      fmt::format("{}/{} loss {:.4g} scale {} skipped {} {:.3g} steps/s {} left", record.step,
                  steps_, record.loss, record.scale, so_far.skipped, rate, duration(left));
  if (!terminal_) {
    fmt::print(stderr, "{}: {}\n", name_, facts);
    return;
  }
  const int width = terminal_width();
  const int room = std::clamp(width - static_cast<int>(name_.size() + facts.size()) - 5, 0, 30);
  const auto full = static_cast<int>(room * record.step / steps_);
  std::string line = name_ + " ";
  if (room >= 5) {
    line += fmt::format("[{}{}] ", std::string(static_cast<size_t>(full), '#'),
                        std::string(static_cast<size_t>(room - full), '.'));
  }
  line += facts;
  fmt::print(stderr, "\r{}\x1b[K", line.substr(0, static_cast<size_t>(width - 1)));
  std::fflush(stderr);
}

void Progress::finish() {
  if (terminal_) fmt::print(stderr, "\r\x1b[K");
  std::fflush(stderr);
}

StepLog::StepLog(const std::string& path) : path_(path), file_(path) {
  if (!file_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("'{}' cannot be written: {}.", path, std::strerror(errno)));
  }
}

void StepLog::add(const StepRecord& record) { file_ << step_json(record).dump() << '\n'; }

void StepLog::finish() {
  file_.close();
  if (!file_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("'{}' could not be written to its end; is the disk full?", path_));
  }
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || !std::filesystem::is_directory(path)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("The folder '{}' cannot be made: {}.", path,
                            error ? error.message() : "there is a file of that name"));
  }
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("'{}' could not be written.", path));
  }
}

std::string summary_json(const TrainConfig& config, const RunResult& result) {
  const nlohmann::ordered_json summary = {
      {"model", config.model},
      {"precision", config.precision},
      {"opt_level", fmt::format("O{}", static_cast<int>(config.level()))},
      {"loss_scale", config.loss_scale},
      {"optimizer", config.optimizer},
      {"lr", config.lr},
      {"clip", config.clip},
      {"batch", config.batch},
      {"accumulate", config.accumulate},
      {"seed", config.seed},
      {"steps", result.steps.size()},
      {"skipped", result.skipped},
      {"final_scale", result.final_scale},
      {"loss", result.score.loss},
      {"metric", result.metric_name},
      {"score", result.score.metric},
      {"gradients_looked_at", result.lost.values},
      {"gradients_lost", result.lost.zeroed},
      {"seconds", result.seconds},
      {"interrupted", result.interrupted},
      {"alarm", result.alarm}};
  return summary.dump(2) + "\n";
}

RunResult watched_run(const TrainConfig& config, Task& task, const std::string& name,
                      const std::string& folder) {
  std::optional<StepLog> log;
  if (!folder.empty()) {
    make_folder(folder);
    log.emplace(folder + "/steps.jsonl");
  }
  Progress progress(name, config.steps);
  const RunResult result =
      run(config, task, [&](const StepRecord& record, const RunResult& so_far) {
        if (log.has_value()) log->add(record);
        progress.show(record, so_far);
        return !Interrupt::requested();
      });
  progress.finish();
  if (log.has_value()) {
    log->finish();
    write_file(folder + "/summary.json", summary_json(config, result));
  }
  return result;
}

}  // namespace headroom::cli
