// The checkpoints of a training run. They hold everything that the run depends on, so that a run
// that was killed and resumed gives bit-identical results.
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

/// The objects whose state a checkpoint holds.
struct Training {
  Task& task;
  libtorch::FusedOptimizer& optimizer;
  libtorch::GradScaler& scaler;
};

class Checkpoints {
 public:
  /// Reads and writes nothing yet; begin() and read_settings() open the folder. With several ranks,
  /// the first writes and the others, which have the same state, only read.
  explicit Checkpoints(std::string folder, bool writes = true)
      : path_(std::move(folder)), writes_(writes) {}

  /// Starts a new run: deletes existing checkpoints.
  void begin(const TrainConfig& config);

  /// For a resumed run: sets the options that are missing on the command line to their saved
  /// values. Throws Error(kBadState) if there is no valid checkpoint.
  void read_settings(CLI::App& command);
  /// For a resumed run: throws Error(kInvalidArgument) if a setting differs that would change the
  /// results. If the run had escaped to another precision, changes `config` to that precision.
  void resume(TrainConfig* config);

  /// Makes the next restore() load the newest valid checkpoint into a model of this precision.
  void escape(const std::string& precision);

  /// If the run is resumed, loads the newest valid checkpoint into `training`, puts the steps so
  /// far into `result` and the last one into `step`, and reports on standard error which checkpoint
  /// it uses. Returns false if the run is new.
  bool restore(const Training& training, RunResult* result, int64_t* step);

  /// Saves a checkpoint if one is due. A failure is reported on standard error and does not stop
  /// the training; older checkpoints are kept.
  void after_step(int64_t step, const Training& training, const RunResult& result);

  /// Saves the last step, unless it has been saved. Returns an error sentence, or an empty string.
  std::string finish(int64_t step, const Training& training, const RunResult& result);

 private:
  void use_settings(const TrainConfig& config);
  void try_save(int64_t step, const Training& training, const RunResult& result);
  void save(int64_t step, const Training& training, const RunResult& result);
  void load(const Checkpoint& checkpoint, const Training& training, RunResult* result) const;

  std::string path_;
  bool writes_;
  std::optional<CheckpointFolder> folder_;
  std::vector<std::pair<std::string, std::string>> settings_;
  std::string device_;
  std::string escaped_;  // precision that the run has switched to; empty: none
  int64_t every_ = 0;
  bool save_first_ = false;  // also save before the first step, for --escape
  bool resumed_ = false;
  int64_t last_ = -1;  // the step that was last saved or restored
};

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_CHECKPOINT_H_
