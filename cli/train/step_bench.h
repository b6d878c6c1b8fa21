#ifndef HEADROOM_CLI_TRAIN_STEP_BENCH_H_
#define HEADROOM_CLI_TRAIN_STEP_BENCH_H_

#include <functional>
#include <string>

namespace headroom::cli {

/// Two ways to do the same, timed in turns.
struct StepFigure {
  std::string name;
  double ours = 0.0;    // milliseconds, a median
  double theirs = 0.0;  // the same
  std::string theirs_is;
};

/// Optimizer steps through LibTorch: FusedAdamW under a GradScaler against LibTorch's own calls on
/// the tensors of GPT-2 small, and what the scaler, the history and looks at the layers add to
/// training steps of the trainer's models.
void run_step_bench(int repetitions, const std::function<void(const StepFigure&)>& done);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_STEP_BENCH_H_
