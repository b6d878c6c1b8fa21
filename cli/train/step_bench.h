// Benchmarks of whole steps through LibTorch.
#ifndef HEADROOM_CLI_TRAIN_STEP_BENCH_H_
#define HEADROOM_CLI_TRAIN_STEP_BENCH_H_

#include <functional>
#include <string>

namespace headroom::cli {

/// Two implementations of the same work, timed alternately.
struct StepFigure {
  std::string name;
  double ours = 0.0;    // median in milliseconds
  double theirs = 0.0;  // median in milliseconds
  std::string theirs_is;
};

/// Compares FusedAdamW under a GradScaler with LibTorch's own calls on the tensors of GPT-2 small,
/// and measures the cost of the scaler, the history and layer snapshots in training steps of the
/// trainer's models. Calls `done` with every figure.
void run_step_bench(int repetitions, const std::function<void(const StepFigure&)>& done);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_STEP_BENCH_H_
