// Host time of a scaled step through LibTorch: the CPU time of scale(), step() and update() for the
// 161 tensors of ResNet-50 in FP16 on a CUDA device, and the time of the whole step.
#include <headroom/libtorch.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

using headroom::libtorch::FusedAdamW;
using headroom::libtorch::GradScaler;
using headroom::libtorch::GradScalerOptions;

std::vector<torch::Tensor> resnet50() {
  std::vector<std::vector<int64_t>> shapes;
  const auto conv = [&](int64_t out, int64_t in, int64_t size) {
    shapes.push_back({out, in, size, size});
    shapes.push_back({out});  // weight and bias of the batch norm after it
    shapes.push_back({out});
  };
  conv(64, 3, 7);
  int64_t channels = 64;
  const int64_t blocks[] = {3, 4, 6, 3};
  for (int64_t stage = 0; stage < 4; ++stage) {
    const int64_t width = 64 << stage;
    for (int64_t block = 0; block < blocks[stage]; ++block) {
      conv(width, channels, 1);
      conv(width, width, 3);
      conv(4 * width, width, 1);
      if (block == 0) conv(4 * width, channels, 1);
      channels = 4 * width;
    }
  }
  shapes.push_back({1000, 2048});
  shapes.push_back({1000});
  std::vector<torch::Tensor> tensors;
  for (const auto& shape : shapes) {
    tensors.push_back(
        torch::randn(shape, torch::device(torch::kCUDA).dtype(torch::kHalf)).requires_grad_());
    tensors.back().mutable_grad() = torch::randn_like(tensors.back()) * 0.01;
  }
  return tensors;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

int main() {
  using Clock = std::chrono::steady_clock;
  const auto microseconds = [](Clock::duration d) {
    return std::chrono::duration<double, std::micro>(d).count();
  };
  std::vector<torch::Tensor> tensors = resnet50();
  FusedAdamW optimizer(tensors, torch::optim::AdamWOptions(1e-3));
  GradScaler scaler(GradScalerOptions().device(torch::kCUDA));
  const torch::Tensor loss = torch::ones({}, torch::device(torch::kCUDA));
  std::vector<double> host, whole;
  for (int step = 0; step < 300; ++step) {
    torch::cuda::synchronize();
    const auto start = Clock::now();
    scaler.scale(loss);
    scaler.step(optimizer);
    scaler.update();
    const auto enqueued = Clock::now();
    torch::cuda::synchronize();
    if (step < 50) continue;
    host.push_back(microseconds(enqueued - start));
    whole.push_back(microseconds(Clock::now() - start));
  }
  std::printf("%zu tensors through LibTorch: host %.1f us, whole step %.1f us, scale %g\n",
              tensors.size(), median(host), median(whole), scaler.get_scale());
  return 0;
}
