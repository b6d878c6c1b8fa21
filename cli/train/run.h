// The training loop.
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

/// The outcome of one step.
struct StepRecord {
  int64_t step = 0;  // from 1
  double loss = 0.0;
  double scale = 1.0;  // of this step's loss
  double grad_norm = 0.0;
  double lr = 0.0;
  double seconds = 0.0;  // since the run began
  bool applied = true;
  std::string culprit;  // the tensor that overflowed in a skipped step
  int64_t retries = 0;  // of the batch, at lower scales
};

/// The outcome of a run, up to its end or to where it was stopped.
struct RunResult {
  std::vector<StepRecord> steps;
  int64_t skipped = 0;
  int64_t retries = 0;       // passes that overflowed and were retried at a lower scale
  double final_scale = 1.0;  // of the step that would have been next
  double seconds = 0.0;      // of training, without the score
  Score score;
  std::string metric_name;
  libtorch::CastLoss lost;         // gradients that casts made zero, in a sample of the steps
  std::vector<LayerStats> layers;  // the last snapshot, if there was one
  int64_t layers_step = 0;         // its step
  double layers_scale = 1.0;       // its scale
  std::string no_layers;           // why no snapshot could be taken
  Picture target, picture;
  bool interrupted = false;
  int64_t injected = 0;   // elements changed by --inject
  std::string escaped;    // why the run switched to another precision; empty if it did not
  std::string alarm;      // why the run gave up; empty if it did not
  std::string not_saved;  // why the last checkpoint or the end of the history was not written
};

class Checkpoints;

/// Measures the gradients of every parameter as backward left them, still scaled.
std::vector<LayerStats> measure_gradients(const torch::nn::Module& model);

/// Optional services of a run; null if absent. Not owned.
struct RunContext {
  Team* team = nullptr;                // the other ranks
  Recorder* recorder = nullptr;        // writes the history
  Checkpoints* checkpoints = nullptr;  // restores a checkpoint if asked to, and saves more
};

/// Called after every step. Returning false stops the run; with several ranks, all of them stop
/// after the next step.
using StepCallback = std::function<bool(const StepRecord&, const RunResult&)>;

/// Trains the task. `note` is the reason why the run continues from a checkpoint, for the history.
RunResult run(const TrainConfig& config, Task& task, const RunContext& context,
              const StepCallback& on_step, const std::string& note = "");

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_RUN_H_
