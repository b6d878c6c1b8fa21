// What a person sees while a run goes on, and how they stop it.
#ifndef HEADROOM_CLI_TRAIN_WATCH_H_
#define HEADROOM_CLI_TRAIN_WATCH_H_

#include <chrono>
#include <fstream>
#include <string>

#include "cli/train/run.h"

namespace headroom::cli {

/// As long as it lives, the first Ctrl-C asks the run to end and the second one kills it.
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

/// A file of one JSON object a line, one line a step. Throws Error(kInvalidArgument) if it cannot
/// be made, and finish() if not everything could be written.
class StepLog {
 public:
  explicit StepLog(const std::string& path);
  void add(const StepRecord& record);
  void finish();

 private:
  std::string path_;
  std::ofstream file_;
};

/// Makes the folder, and its parents.
void make_folder(const std::string& path);

/// The numbers of a run as JSON.
std::string summary_json(const TrainConfig& config, const RunResult& result);

/// run() with a bar, a step log in `folder` (none if empty) and a summary beside it.
RunResult watched_run(const TrainConfig& config, Task& task, const std::string& name,
                      const std::string& folder);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_WATCH_H_
