// A byte-level transformer language model.
#include <fmt/format.h>
#include <headroom/error.h>
#include <headroom/libtorch.h>

#include <cmath>
#include <random>
#include <utility>

#include "cli/train/data.h"
#include "cli/train/layers.h"
#include "cli/train/random_state.h"
#include "cli/train/task.h"

namespace headroom::cli {
namespace {

constexpr int64_t kBytes = 256;
constexpr int64_t kHeads = 4;

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const TrainConfig& config) : width_(config.width) {
    norm1_ = register_module("norm1", Norm(width_));
    attention_ = register_module("attention", Dense(width_, 3 * width_, config));
    mix_ = register_module("mix", Dense(width_, width_, config));
    norm2_ = register_module("norm2", Norm(width_));
    up_ = register_module("up", Dense(width_, 4 * width_, config));
    down_ = register_module("down", Dense(4 * width_, width_, config));
  }

  torch::Tensor forward(torch::Tensor x, const torch::Tensor& mask) {
    x = x + fp32_on_cpu(mix_->forward(attend(norm1_->forward(x), mask)));
    return x +
           fp32_on_cpu(down_->forward(torch::gelu(fp32_on_cpu(up_->forward(norm2_->forward(x))))));
  }

 private:
  torch::Tensor attend(const torch::Tensor& x, const torch::Tensor& mask) {
    const int64_t batch = x.size(0);
    const int64_t length = x.size(1);
    const int64_t head = width_ / kHeads;
    const auto parts = attention_->forward(x).chunk(3, -1);
    const auto split = [&](const torch::Tensor& part) {
      return part.reshape({batch, length, kHeads, head}).transpose(1, 2);
    };
    const torch::Tensor scores =
        fp32_on_cpu(libtorch::matmul(split(parts[0]), split(parts[1]).transpose(2, 3)));
    const torch::Tensor weights =
        torch::softmax(scores / std::sqrt(static_cast<double>(head)) + mask, -1);
    const torch::Tensor values = split(parts[2]);
    const torch::Tensor mixed =
        libtorch::matmul(libtorch::cast(weights, values.scalar_type()), values);
    return mixed.transpose(1, 2).reshape({batch, length, width_});
  }

  int64_t width_;
  Norm norm1_ = nullptr, norm2_ = nullptr;
  Dense attention_ = nullptr, mix_ = nullptr, up_ = nullptr, down_ = nullptr;
};
TORCH_MODULE(Block);

class TransformerImpl : public torch::nn::Module {
 public:
  explicit TransformerImpl(const TrainConfig& config) {
    embed_ = register_parameter("embed", torch::randn({kBytes, config.width}) * 0.1);
    position_ = register_parameter("position", torch::randn({config.context, config.width}) * 0.1);
    for (int64_t i = 0; i < config.depth; ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i), Block(config)));
    }
    norm_ = register_module("norm", Norm(config.width));
    out_ = register_module("out", Dense(config.width, kBytes, config));
    mask_ = torch::full({config.context, config.context}, -1e4).triu(1).to(config.torch_device());
  }

  torch::Tensor forward(const torch::Tensor& bytes) {
    torch::Tensor x = fp32_on_cpu(torch::embedding(embed_, bytes) + position_);
    for (Block& block : blocks_) x = block->forward(x, mask_);
    return out_->forward(norm_->forward(x));
  }

 private:
  torch::Tensor embed_, position_, mask_;
  std::vector<Block> blocks_;
  Norm norm_ = nullptr;
  Dense out_ = nullptr;
};
TORCH_MODULE(Transformer);

class Gpt : public Task {
 public:
  explicit Gpt(const TrainConfig& config)
      : device_(config.torch_device()),
        part_(config.part),
        batch_(config.batch),
        context_(config.context),
        random_(config.seed) {
    const std::string text = config.data.empty() ? synthetic_text(1 << 18) : read_text(config.data);
    // The last tenth is the test set.
    train_ = static_cast<int64_t>(text.size() - text.size() / 10);
    if (train_ < context_ + 1 || static_cast<int64_t>(text.size()) - train_ < context_ + 1) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("The text has {} bytes; with a context of {} at least {} are needed. "
                              "Give a longer text or a smaller --context.",
                              text.size(), context_, 10 * (context_ + 2)));
    }
    text_ = torch::from_blob(const_cast<char*>(text.data()), {static_cast<int64_t>(text.size())},
                             torch::kByte)
                .to(torch::kLong);
    torch::manual_seed(config.seed);
    model_ = Transformer(config);
  }

  torch::nn::Module& model() override { return *model_; }
  void next_batch() override { now_ = part_.of(draw(0, train_, random_)); }
  torch::Tensor loss(int64_t) override { return mean(now_); }

  std::string data_position() const override { return random_state(random_); }
  void set_data_position(const std::string& text) override { set_random_state(random_, text); }

  Score score() override {
    const torch::NoGradGuard no_grad;
    std::mt19937_64 random(77);
    constexpr int kBatches = 8;
    double total = 0.0;
    for (int i = 0; i < kBatches; ++i) {
      total += mean(draw(train_, text_.size(0), random)).item<double>();
    }
    const double loss = total / kBatches;
    return {loss, loss / std::log(2.0)};
  }

  std::string metric_name() const override { return "bits/byte"; }

 private:
  torch::Tensor draw(int64_t begin, int64_t end, std::mt19937_64& random) {
    std::vector<torch::Tensor> rows;
    for (int64_t i = 0; i < batch_; ++i) {
      const auto room = static_cast<uint64_t>(end - begin - context_);
      const int64_t at = begin + static_cast<int64_t>(random() % room);
      rows.push_back(text_.slice(0, at, at + context_ + 1));
    }
    return torch::stack(rows).to(device_);
  }

  torch::Tensor mean(const torch::Tensor& rows) {
    const torch::Tensor logits = fp32_on_cpu(model_->forward(rows.slice(1, 0, context_)));
    return torch::nll_loss(torch::log_softmax(logits.flatten(0, 1), 1, torch::kFloat),
                           rows.slice(1, 1, context_ + 1).flatten());
  }

  torch::Device device_;
  Part part_;
  int64_t batch_;
  int64_t context_;
  int64_t train_ = 0;
  std::mt19937_64 random_;
  torch::Tensor text_, now_;
  Transformer model_ = nullptr;
};

}  // namespace

std::unique_ptr<Task> make_gpt(const TrainConfig& config) { return std::make_unique<Gpt>(config); }

std::unique_ptr<Task> make_task(const TrainConfig& config) {
  if (config.model == "field") return make_field(config);
  if (config.model == "lm") return make_lm(config);
  if (config.model == "gpt") return make_gpt(config);
  return make_images(config);
}

}  // namespace headroom::cli
