// Progress output, interruption by signals, and the history of a run.
#ifndef HEADROOM_CLI_TRAIN_WATCH_H_
#define HEADROOM_CLI_TRAIN_WATCH_H_

#include <chrono>
#include <string>

#include "cli/train/run.h"

namespace headroom::cli {

/// While it exists, the first SIGINT or SIGTERM requests a stop and the second one kills the
/// process. SIGHUP, sent when the terminal is closed, also requests a stop, unless it was ignored
/// (nohup).
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static bool requested();
};

/// Progress on standard error: a bar on a terminal, otherwise a line every few seconds.
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

/// run() with a progress bar and, unless `folder` is empty, a history in `folder`; both on the
/// first rank only. If the run gives up and --escape is set, trains on in that precision.
RunResult run_with_progress(const TrainConfig& config, Task& task, const RunInfo& info,
                            const std::string& folder, RunContext context = {});

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_WATCH_H_
