// The cost of agreement between ranks, compared with averaging their gradients in the same run:
//     mpirun -n 2 headroom_agree_bench          or over Gloo, with torchrun's variables
#include <headroom/error.h>
#include <headroom/headroom.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "cli/train/ranks.h"

namespace headroom::cli {
namespace {

// The median time of a call in microseconds. All ranks must make the same calls.
double median_microseconds(int repetitions, const std::function<void()>& call) {
  std::vector<double> times;
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
            .count());
  }
  std::nth_element(times.begin(), times.begin() + repetitions / 2, times.end());
  return times[static_cast<size_t>(repetitions / 2)];
}

int bench() {
  const Launch launch = launch_from_environment();
  torch::set_num_threads(1);
  set_num_threads(1);
  const auto team = make_team(launch, std::chrono::minutes(1));
  if (team == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "There is only one rank; start this with mpirun or torchrun.");
  }
  // A step of 8 elements, with and without agreement.
  std::vector<float> weights(8), grads(8, 1.0f);
  SGD optimizer({{"w", view(weights), view(grads)}});
  const auto make_step = [&](GradScaler& scaler) {
    return [&] {
      scaler.scale(1.0f);
      scaler.step(optimizer);
      scaler.update();
    };
  };
  GradScaler alone(StaticScale{1.0f});
  GradScaler together(StaticScale{1.0f}, {.ranks = team->ranks()});
  const double step_alone = median_microseconds(2000, make_step(alone));
  const double step_together = median_microseconds(2000, make_step(together));
  std::vector<double> message(32, 1.0);
  const double reduce = median_microseconds(
      2000, [&] { team->ranks()->reduce(message.data(), 8, message.data() + 8, 24); });
  if (launch.first()) {
    std::printf("%s, %d ranks\n", launch.by == Launch::By::kMpirun ? "MPI" : "Gloo", launch.size);
    std::printf("  one message              %10.1f us\n", reduce);
    std::printf("  step, alone and together %10.1f us %.1f us\n", step_alone, step_together);
  }
  for (const int64_t count : {int64_t{1} << 17, int64_t{1} << 20, int64_t{1} << 23}) {
    torch::Tensor parameter = torch::zeros({count}).requires_grad_(true);
    parameter.mutable_grad() = torch::ones({count});
    double loss = 0.0;
    const double average =
        median_microseconds(20, [&] { team->average({parameter}, &loss, false); });
    if (launch.first()) {
      std::printf("  average %8lld gradients %9.1f us, %.0f messages\n",
                  static_cast<long long>(count), average, average / reduce);
    }
  }
  return 0;
}

}  // namespace
}  // namespace headroom::cli

int main() {
  try {
    return headroom::cli::bench();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "headroom_agree_bench: %s\n", error.what());
    return 2;
  }
}
