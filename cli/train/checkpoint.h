// The checkpoints of a training run: all that its course depends on, so that a run which was killed
// goes on bit by bit as if it had not been.
#ifndef HEADROOM_CLI_TRAIN_CHECKPOINT_H_
#define HEADROOM_CLI_TRAIN_CHECKPOINT_H_

#include <headroom/checkpoint.h>
#include <headroom/libtorch.h>

#include <CLI/CLI.hpp>
#include <optional>
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
  /// Nothing is read or written yet; begin() and take_settings() take the folder for this run. Of
  /// several ranks the first writes, and the others, whose states are the same, read what it wrote.
  explicit Checkpoints(std::string folder, bool writes = true)
      : path_(std::move(folder)), writes_(writes) {}

  /// For a run that begins anew: checkpoints that are there go, as the run's history does.
  void begin(const TrainConfig& config);

  /// For a run that goes on. First the options that the command line does not have are set as they
  /// were; then the settings are compared, and one that would change the course is refused. A run
  /// that has escaped to another precision goes on there. Throws Error(kBadState) if no checkpoint
  /// is good.
  void take_settings(CLI::App& command);
  void resume(TrainConfig* config);

  /// The next restore() goes back to the newest good checkpoint, for a model in this precision.
  void escape(const std::string& precision);

  /// For a run that goes on, puts the newest good checkpoint in the place of what `training` has,
  /// and the steps so far in `result`; tells on standard error which one it is and which ones were
  /// left out. False if the run begins anew. `step` is the last one that was done.
  bool restore(const Training& training, RunResult* result, int64_t* step);

  /// Saves if it is time to. If that fails it is told on standard error, the checkpoints before
  /// stay, and training goes on.
  void after_step(int64_t step, const Training& training, const RunResult& result);

  /// Saves the last step, unless that has been done. What went wrong, or nothing.
  std::string finish(int64_t step, const Training& training, const RunResult& result);

 private:
  void take_over(const TrainConfig& config);
  void try_save(int64_t step, const Training& training, const RunResult& result);
  void save(int64_t step, const Training& training, const RunResult& result);
  void put_back(const Checkpoint& checkpoint, const Training& training, RunResult* result) const;

  std::string path_;
  bool writes_;
  std::optional<CheckpointFolder> folder_;
  std::vector<std::pair<std::string, std::string>> settings_;
  std::string device_;
  std::string escaped_;  // the precision that the run has gone over to; empty: none
  int64_t every_ = 0;
  bool from_the_start_ = false;  // save before the first step too
  bool resumed_ = false;
  int64_t last_ = -1;  // the step that was last saved or restored
};

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_CHECKPOINT_H_
