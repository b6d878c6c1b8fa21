#include "cli/train/step_bench.h"

#include <headroom/libtorch.h>
#include <headroom/record.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "cli/train/run.h"
#include "cli/train/task.h"

namespace headroom::cli {
namespace {

double milliseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// The 148 parameters of GPT-2 small, with gradients.
std::vector<torch::Tensor> gpt2_small(torch::ScalarType dtype) {
  constexpr int64_t kWidth = 768;
  std::vector<std::vector<int64_t>> shapes = {{50257, kWidth}, {1024, kWidth}};
  for (int layer = 0; layer < 12; ++layer) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{kWidth},
                                                                               {kWidth},
                                                                               {3 * kWidth, kWidth},
                                                                               {3 * kWidth},
                                                                               {kWidth, kWidth},
                                                                               {kWidth},
                                                                               {kWidth},
                                                                               {kWidth},
                                                                               {4 * kWidth, kWidth},
                                                                               {4 * kWidth},
                                                                               {kWidth, 4 * kWidth},
                                                                               {kWidth}}) {
      shapes.push_back(shape);
    }
  }
  shapes.push_back({kWidth});
  shapes.push_back({kWidth});
  std::vector<torch::Tensor> params;
  for (const auto& shape : shapes) {
    torch::Tensor parameter = torch::full(shape, 0.02f).to(dtype).requires_grad_(true);
    parameter.mutable_grad() = torch::full(shape, 0.5f).to(dtype);
    params.push_back(parameter);
  }
  return params;
}

// The step that a LibTorch user would write without Headroom.
void libtorch_step(const std::vector<torch::Tensor>& params, torch::optim::AdamW& optimizer,
                   float scale) {
  const torch::NoGradGuard no_grad;
  bool finite = true;
  for (const torch::Tensor& parameter : params) {
    parameter.grad().mul_(1.0f / scale);
    finite = finite && torch::isfinite(parameter.grad()).all().item<bool>();
  }
  if (!finite) return;
  torch::nn::utils::clip_grad_norm_(params, 1.0);
  optimizer.step();
}

void whole_step(int repetitions, const std::function<void(const StepFigure&)>& done) {
  const std::vector<torch::Tensor> theirs = gpt2_small(torch::kFloat);
  torch::optim::AdamW plain(theirs, torch::optim::AdamWOptions(1e-5));
  for (const auto dtype : {torch::kFloat, torch::kHalf}) {
    const std::vector<torch::Tensor> ours = gpt2_small(dtype);
    libtorch::FusedAdamW fused(ours, torch::optim::AdamWOptions(1e-5));
    libtorch::GradScaler scaler;
    const auto our_step = [&] {
      scaler.scale(torch::ones({}));
      scaler.step(fused, {1.0f});
      scaler.update();
    };
    std::vector<double> our_times, their_times;
    const float scale = 1.0f;  // the gradients are reused, so they must not shrink
    our_step();
    libtorch_step(theirs, plain, scale);
    for (int i = 0; i < repetitions; ++i) {
      our_times.push_back(milliseconds(our_step));
      their_times.push_back(milliseconds([&] { libtorch_step(theirs, plain, scale); }));
    }
    done({dtype == torch::kFloat ? "step/gpt2-small/fp32" : "step/gpt2-small/fp16+masters",
          median(our_times), median(their_times),
          "LibTorch's mul_, isfinite, clip_grad_norm_ and AdamW, in FP32"});
  }
}

void scaler_share(const std::string& model, int repetitions,
                  const std::function<void(const StepFigure&)>& done) {
  TrainConfig config;
  config.model = model;
  config.precision = "fp16";
  resolve(&config);
  const auto task = make_task(config);
  libtorch::FusedAdamW optimizer(task->model().parameters(), torch::optim::AdamWOptions(1e-5));
  libtorch::GradScaler scaler;
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("headroom-bench-" + std::to_string(::getpid()));
  Recorder recorder(folder.string());
  std::vector<double> forward_backward, scale, snapshot, with, write, without;
  for (int i = 0; i < repetitions + 2; ++i) {
    optimizer.zero_grad();
    task->next_batch();
    torch::Tensor loss, scaled;
    forward_backward.push_back(milliseconds([&] {
      const libtorch::Autocast scope(torch::kCPU, torch::kHalf);
      loss = task->loss(0);
    }));
    scale.push_back(milliseconds([&] { scaled = scaler.scale(loss); }));
    forward_backward.back() += milliseconds([&] { scaled.backward(); });
    snapshot.push_back(milliseconds(
        [&] { recorder.layers(i, scaler.get_scale(), measure_gradients(task->model())); }));
    StepReport report;
    with.push_back(milliseconds([&] {
      report = scaler.step(optimizer);
      scaler.update();
    }));
    write.push_back(milliseconds([&] { recorder.step(i, 0.5, report, {{"lr", 1e-5}}); }));
    without.push_back(milliseconds([&] { optimizer.step(); }));
  }
  std::filesystem::remove_all(folder);
  const double added = median(scale) + std::max(0.0, median(with) - median(without));
  const double step = median(forward_backward) + median(without);
  done({"scaler/" + model, added, step, "a whole training step without it"});
  done({"history/" + model, median(write), step, "the same"});
  done({"layers, every 10th/" + model, median(snapshot) / 10.0, step, "the same"});
}

}  // namespace

void run_step_bench(int repetitions, const std::function<void(const StepFigure&)>& done) {
  whole_step(repetitions, done);
  for (const char* model : {"gpt", "cnn"}) scaler_share(model, 4 * repetitions, done);
}

}  // namespace headroom::cli
