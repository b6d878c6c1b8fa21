// Trains GPT-2 124M on a CUDA device in FP32, in FP16 without a scaler and in FP16 with a scaler on
// the device. Prints the cost of the scaler and the difference of the losses.
//     headroom_gpt2_bench [steps] [text]
#include <headroom/libtorch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include <cuda_runtime.h>

namespace hr = headroom;
namespace nn = torch::nn;

namespace {

constexpr int64_t kWords = 50257, kContext = 1024, kWidth = 768, kHeads = 12, kLayers = 12;
constexpr int64_t kBatch = 16;

struct BlockImpl : nn::Module {
  BlockImpl() {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", nn::Linear(kWidth, 3 * kWidth));
    mix = register_module("mix", nn::Linear(kWidth, kWidth));
    up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", nn::Linear(4 * kWidth, kWidth));
  }
  torch::Tensor forward(torch::Tensor x) {
    const int64_t batch = x.size(0), length = x.size(1);
    const torch::Tensor parts = attention->forward(norm1->forward(x))
                                    .view({batch, length, 3, kHeads, kWidth / kHeads})
                                    .permute({2, 0, 3, 1, 4});
    const torch::Tensor mixed =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + mix->forward(mixed.transpose(1, 2).reshape({batch, length, kWidth}));
    return x + down->forward(torch::gelu(up->forward(norm2->forward(x)), "tanh"));
  }
  nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  nn::Linear attention = nullptr, mix = nullptr, up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct Gpt2Impl : nn::Module {
  Gpt2Impl() {
    embed = register_parameter("embed", torch::randn({kWords, kWidth}) * 0.02);
    position = register_parameter("position", torch::randn({kContext, kWidth}) * 0.02);
    for (int64_t i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  }
  torch::Tensor loss(const torch::Tensor& rows) {
    torch::Tensor x = torch::embedding(embed, rows.slice(1, 0, kContext)) + position;
    for (Block& block : blocks) x = block->forward(x);
    const torch::Tensor words = torch::linear(norm->forward(x), embed);
    return torch::cross_entropy_loss(words.flatten(0, 1), rows.slice(1, 1).flatten());
  }
  torch::Tensor embed, position;
  std::vector<Block> blocks;
  nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Gpt2);

// Reads a text and returns its pairs of bytes as tokens.
torch::Tensor read_tokens(const std::string& path) {
  std::string text;
  if (!path.empty()) {
    std::ifstream file(path, std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  if (text.size() < 1 << 20) {
    std::fprintf(stderr, "Give a text of 1 MiB or more: headroom_gpt2_bench STEPS FILE\n");
    std::exit(2);
  }
  std::vector<int64_t> words;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    const auto first = static_cast<unsigned char>(text[i]);
    const auto second = static_cast<unsigned char>(text[i + 1]);
    words.push_back((first * 256 + second) % kWords);
  }
  return torch::tensor(words).to(torch::kCUDA);
}

enum class Way {
  kFp32,
  kFp16ByHand,  // the loss times 65536 and no unscaling, since Adam's update does not depend on the
                // scale
  kFp16Scaled,
};

class Training {
 public:
  Training(Way way, const torch::Tensor& words, int seed = 1)
      : way_(way), words_(words), model_(make_model(seed)) {
    optimizer_ = std::make_unique<hr::libtorch::FusedAdamW>(
        model_->parameters(), torch::optim::AdamWOptions(3e-4).weight_decay(0.1));
    torch::manual_seed(6 + seed);
  }

  // Returns the loss, on the device.
  torch::Tensor step() {
    optimizer_->zero_grad();
    const torch::Tensor at =
        torch::randint(words_.size(0) - kContext - 1, {kBatch, 1}, torch::kLong).to(torch::kCUDA);
    const torch::Tensor rows =
        words_.index({at + torch::arange(kContext + 1, torch::kCUDA).unsqueeze(0)});
    torch::Tensor loss;
    if (way_ == Way::kFp32) {
      loss = model_->loss(rows);
    } else {
      const hr::libtorch::Autocast scope(torch::kCUDA, torch::kHalf);
      loss = model_->loss(rows);
    }
    if (way_ == Way::kFp16Scaled) {
      scaler_.scale(loss).backward();
      scaler_.step(*optimizer_);
      scaler_.update();
    } else {
      (way_ == Way::kFp16ByHand ? loss * 65536.0 : loss).backward();
      optimizer_->step();
    }
    return loss.detach();
  }

  hr::libtorch::GradScaler& scaler() { return scaler_; }

 private:
  static Gpt2 make_model(int seed) {
    torch::manual_seed(seed);
    Gpt2 model;
    model->to(torch::kCUDA);
    return model;
  }
  Way way_;
  torch::Tensor words_;
  Gpt2 model_;
  std::unique_ptr<hr::libtorch::FusedAdamW> optimizer_;
  hr::libtorch::GradScaler scaler_{hr::libtorch::GradScalerOptions().device(torch::kCUDA)};
};

float elapsed_ms(const std::function<void()>& work) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaEventRecord(begin);
  work();
  cudaEventRecord(end);
  cudaEventSynchronize(end);
  float ms = 0.0f;
  cudaEventElapsedTime(&ms, begin, end);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms;
}

float median(std::vector<float> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Trains and returns the mean losses of the tenths of the run.
std::vector<float> train_losses(Way way, int steps, const torch::Tensor& words, int seed = 1) {
  Training training(way, words, seed);
  std::vector<torch::Tensor> losses;
  std::vector<float> times;
  for (int i = 0; i < steps; ++i) {
    times.push_back(elapsed_ms([&] { losses.push_back(training.step()); }));
  }
  const torch::Tensor all = torch::stack(losses).to(torch::kFloat).cpu();
  std::printf("%-13s seed %d %8.2f ms a step; loss", way == Way::kFp32 ? "fp32" : "fp16, scaled",
              seed, median(times));
  std::vector<float> means;
  for (int i = 0; i + steps / 10 <= steps; i += steps / 10) {
    means.push_back(all.slice(0, i, i + steps / 10).mean().item<float>());
    std::printf(" %.3f", means.back());
  }
  if (way == Way::kFp16Scaled) {
    const hr::ScaleState state = training.scaler().state();
    std::printf("; %lld of %lld skipped, scale %g", static_cast<long long>(state.skipped()),
                static_cast<long long>(state.steps()), state.scale());
  }
  std::printf("\n");
  return means;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int steps = argc > 1 ? std::max(10, std::atoi(argv[1])) : 500;
  const torch::Tensor words = read_tokens(argc > 2 ? argv[2] : "");
  std::printf("GPT-2 124M, batch %lld x %lld, %d steps\n", static_cast<long long>(kBatch),
              static_cast<long long>(kContext), steps);
  // The cost of the scaler: alternates the same loop with and without it. Both have gradients of
  // the same magnitude, because matrix products are faster on gradients that underflowed to zero.
  {
    Training with(Way::kFp16Scaled, words), without(Way::kFp16ByHand, words);
    std::vector<float> with_times, without_times;
    for (int i = 0; i < 60; ++i) {
      const float a = elapsed_ms([&] { with.step(); });
      const float b = elapsed_ms([&] { without.step(); });
      if (i < 10) continue;
      with_times.push_back(a);
      without_times.push_back(b);
    }
    const float a = median(with_times), b = median(without_times);
    std::printf("with the scaler %.3f ms, without %.3f ms: %+.3f ms, %+.2f %%\n", a, b, a - b,
                100.0f * (a - b) / b);
  }
  const std::vector<float> scaled = train_losses(Way::kFp16Scaled, steps, words);
  const std::vector<float> other = train_losses(Way::kFp16Scaled, steps, words, 2);
  const std::vector<float> wide = train_losses(Way::kFp32, steps, words);
  const auto print_difference = [&](const char* what, const std::vector<float>& one) {
    std::printf("%-28s", what);
    for (size_t i = 0; i < one.size(); ++i) std::printf(" %+.4f", one[i] - scaled[i]);
    std::printf("\n");
  };
  print_difference("fp32 - fp16", wide);
  print_difference("noise: fp16 of another seed", other);
}
