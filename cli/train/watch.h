// What a person sees while a run goes on, and how they stop it.
#ifndef HEADROOM_CLI_TRAIN_WATCH_H_
#define HEADROOM_CLI_TRAIN_WATCH_H_

#include <chrono>
#include <string>

#include "cli/train/run.h"

namespace headroom::cli {

/// As long as it lives, the first Ctrl-C or SIGTERM asks the run to end and the second one kills
/// it. So does SIGHUP, which a terminal sends that is closed, unless it was ignored before, by
/// nohup.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static bool requested();
};

/// One line on standard error: a bar that is drawn over and over on a terminal, else a plain line
/// now and then.
class Progress {
 public:
  Progress(std::string name, int64_t steps);
  void show(const StepRecord& record, const RunResult& so_far);
  void finish();  // removes the bar

 private:
  std::string name_;
  int64_t steps_;
  bool terminal_;
  std::chrono::steady_clock::time_point last_;
};

/// run() with a bar; with its history in `folder` (none if empty), under the given name. All of
/// that on the first rank only.
RunResult watched_run(const TrainConfig& config, Task& task, const RunInfo& info,
                      const std::string& folder, Aids aids = {});

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_WATCH_H_
