// The checkpoints of a training run: all that its course depends on, so that a run which was killed
// goes on bit by bit as if it had not been.
#ifndef HEADROOM_CLI_TRAIN_CHECKPOINT_H_
#define HEADROOM_CLI_TRAIN_CHECKPOINT_H_

#include <headroom/checkpoint.h>
#include <headroom/libtorch.h>

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/train/run.h"

namespace headroom::cli {

/// What a checkpoint is made of and goes back to.
struct Training {
  Task& task;
  libtorch::FusedOptimizer& optimizer;
  libtorch::GradScaler& scaler;
};

class Checkpoints {
 public:
  /// Takes the folder for this run.
  explicit Checkpoints(const std::string& folder) : folder_(folder) {}

  /// For a run that begins anew: checkpoints that are there go, as the run's history does.
  void begin(const TrainConfig& config);

  /// For a run that goes on. First the options that the command line does not have are set as they
  /// were; then the settings are compared, and one that would change the course is refused. Throws
  /// Error(kBadState) if no checkpoint is good.
  void take_settings(CLI::App& command);
  void resume(const TrainConfig& config);

  /// Puts the newest good checkpoint in the place of what `training` has, and the steps so far in
  /// `result`. Tells on standard error which one it is and which ones were left out. Returns its
  /// step; 0 if the run begins anew.
  int64_t restore(const Training& training, RunResult* result);

  /// Saves if it is time to. If that fails it is told on standard error, the checkpoints before
  /// stay, and training goes on.
  void after_step(int64_t step, const Training& training, const RunResult& result);

  /// Saves the last step, unless that has been done. What went wrong, or nothing.
  std::string finish(int64_t step, const Training& training, const RunResult& result);

 private:
  void save(int64_t step, const Training& training, const RunResult& result);
  void put_back(const Checkpoint& checkpoint, const Training& training, RunResult* result) const;

  CheckpointFolder folder_;
  std::vector<std::pair<std::string, std::string>> course_;
  std::string device_;
  int64_t every_ = 0;
  bool resumed_ = false;
  int64_t last_ = -1;  // the step that was last saved or restored
};

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_CHECKPOINT_H_
