#ifndef HEADROOM_CLI_TRAIN_RUN_H_
#define HEADROOM_CLI_TRAIN_RUN_H_

#include <headroom/libtorch.h>
#include <headroom/record.h>

#include <functional>
#include <string>
#include <vector>

#include "cli/train/config.h"
#include "cli/train/ranks.h"
#include "cli/train/task.h"

namespace headroom::cli {

/// What one step did.
struct StepRecord {
  int64_t step = 0;  // from 1
  double loss = 0.0;
  double scale = 1.0;  // that this step's loss was multiplied by
  double grad_norm = 0.0;
  double lr = 0.0;
  double seconds = 0.0;  // since the run began
  bool applied = true;
  std::string culprit;  // of a skipped step
  int64_t retries = 0;  // of its batch, at a lower scale
};

/// What a run did, up to its end or to where it was stopped.
struct RunResult {
  std::vector<StepRecord> steps;
  int64_t skipped = 0;
  int64_t retries = 0;       // passes that overflowed and were repeated at a lower scale
  double final_scale = 1.0;  // for the step that would have come next
  double seconds = 0.0;      // of training alone
  Score score;
  std::string metric_name;
  libtorch::CastLoss lost;         // of the gradients, in the steps that were looked at
  std::vector<LayerStats> layers;  // of the last look at them, if there was one,
  int64_t layers_step = 0;         // in this step
  double layers_scale = 1.0;
  std::string no_layers;  // why the layers could not be looked at
  Picture target, picture;
  bool interrupted = false;
  int64_t injected = 0;   // faults, by --inject
  std::string escaped;    // how it went over to another precision; empty if it did not
  std::string alarm;      // why the scaler gave up; empty if it did not
  std::string not_saved;  // why the last checkpoint or line of the history could not be written
};

class Checkpoints;

/// The gradients of every parameter as backward left them, still scaled.
std::vector<LayerStats> look_at_layers(const torch::nn::Module& model);

/// What a run may have beside it; null: not.
struct Aids {
  Team* team = nullptr;                // the other ranks
  Recorder* recorder = nullptr;        // every step is written down
  Checkpoints* checkpoints = nullptr;  // it goes on from one of them, and saves more
};

/// Trains. `on_step` is called after every step, and ends the run by returning false: of a team,
/// all runs after the next step. `note` says why it goes on from a checkpoint, if that has a
/// reason; the history has it.
RunResult run(const TrainConfig& config, Task& task, const Aids& aids,
              const std::function<bool(const StepRecord&, const RunResult&)>& on_step,
              const std::string& note = "");

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_RUN_H_
