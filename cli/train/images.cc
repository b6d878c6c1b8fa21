// Classifiers of small images: mlp and cnn.
#include <utility>

#include "cli/train/data.h"
#include "cli/train/layers.h"
#include "cli/train/random_state.h"
#include "cli/train/task.h"

namespace headroom::cli {
namespace {

class Classifier : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

class Mlp : public Classifier {
 public:
  Mlp(int64_t pixels, const TrainConfig& config) {
    int64_t in = pixels;
    for (int64_t i = 0; i < config.depth; ++i) {
      hidden_.push_back(
          register_module("hidden" + std::to_string(i), Dense(in, config.width, config)));
      in = config.width;
    }
    out_ = register_module("out", Dense(in, 10, config));
  }

  torch::Tensor forward(torch::Tensor x) override {
    x = x.flatten(1);
    for (Dense& layer : hidden_) x = torch::relu(fp32_on_cpu(layer->forward(x)));
    return out_->forward(x);
  }

 private:
  std::vector<Dense> hidden_;
  Dense out_ = nullptr;
};

class Cnn : public Classifier {
 public:
  Cnn(int64_t height, int64_t width, const TrainConfig& config) {
    int64_t in = 1;
    int64_t channels = config.width;
    for (int64_t i = 0; i < config.depth; ++i) {
      const std::string name = std::to_string(i);
      convs_.push_back(register_module("conv" + name, Conv(in, channels)));
      norms_.push_back(register_module("norm" + name, BatchNorm(channels)));
      in = channels;
      channels *= 2;
      height /= 2;
      width /= 2;
    }
    out_ = register_module("out", Dense(in * height * width, 10, config));
  }

  torch::Tensor forward(torch::Tensor x) override {
    for (size_t i = 0; i < convs_.size(); ++i) {
      x = torch::max_pool2d(torch::relu(norms_[i]->forward(convs_[i]->forward(x))), 2);
    }
    return out_->forward(x.flatten(1));
  }

 private:
  std::vector<Conv> convs_;
  std::vector<BatchNorm> norms_;
  Dense out_ = nullptr;
};

class Images : public Task {
 public:
  explicit Images(const TrainConfig& config)
      : data_(config.data.empty() ? synthetic_digits() : read_idx_folder(config.data)),
        part_(config.part),
        batch_(config.batch),
        generator_(torch::make_generator<at::CPUGeneratorImpl>(config.seed)) {
    for (ImageSet* set : {&data_.train, &data_.test}) {
      set->images = set->images.to(config.torch_device());
      set->labels = set->labels.to(config.torch_device());
    }
    const int64_t height = data_.train.images.size(2);
    const int64_t width = data_.train.images.size(3);
    torch::manual_seed(config.seed);
    if (config.model == "mlp") {
      model_ = std::make_shared<Mlp>(height * width, config);
    } else {
      model_ = std::make_shared<Cnn>(height, width, config);
    }
  }

  torch::nn::Module& model() override { return *model_; }

  void next_batch() override {
    const torch::Tensor chosen =
        part_.of(torch::randint(data_.train.labels.size(0), {batch_}, generator_))
            .to(data_.train.labels.device());
    images_ = data_.train.images.index_select(0, chosen);
    labels_ = data_.train.labels.index_select(0, chosen);
  }

  torch::Tensor loss(int64_t) override { return cross_entropy(images_, labels_); }

  std::string data_position() const override { return random_state(generator_); }
  void set_data_position(const std::string& text) override { set_random_state(generator_, text); }

  Score score() override {
    const torch::NoGradGuard no_grad;
    model_->eval();
    double loss = 0.0;
    int64_t right = 0;
    const int64_t count = data_.test.labels.size(0);
    for (int64_t i = 0; i < count; i += 1024) {
      const torch::Tensor labels = data_.test.labels.slice(0, i, i + 1024);
      const torch::Tensor logits =
          fp32_on_cpu(model_->forward(data_.test.images.slice(0, i, i + 1024)));
      loss += torch::nll_loss(torch::log_softmax(logits, 1, torch::kFloat), labels, {},
                              at::Reduction::Sum)
                  .item<double>();
      right += (logits.argmax(1) == labels).sum().item<int64_t>();
    }
    model_->train();
    return {loss / static_cast<double>(count),
            static_cast<double>(right) / static_cast<double>(count)};
  }

  std::string metric_name() const override { return "accuracy"; }

 private:
  torch::Tensor cross_entropy(const torch::Tensor& images, const torch::Tensor& labels) {
    return torch::nll_loss(
        torch::log_softmax(fp32_on_cpu(model_->forward(images)), 1, torch::kFloat), labels);
  }

  ImageData data_;
  Part part_;
  int64_t batch_;
  torch::Generator generator_;
  torch::Tensor images_, labels_;
  std::shared_ptr<Classifier> model_;
};

}  // namespace

std::unique_ptr<Task> make_images(const TrainConfig& config) {
  return std::make_unique<Images>(config);
}

}  // namespace headroom::cli
