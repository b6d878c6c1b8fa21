// A coordinate network, which maps a position to the value of a field. The built-in field is the
// vertical displacement of a loaded plate in metres: about 1e-3, deliberately not normalised. With
// --data, the field is an image.
#include <headroom/error.h>

#include <cmath>
#include <utility>

#include "cli/train/image.h"
#include "cli/train/layers.h"
#include "cli/train/random_state.h"
#include "cli/train/task.h"

namespace headroom::cli {
namespace {

constexpr int64_t kGrid = 96;  // points per side, for the score and the picture
constexpr double kPi = 3.14159265358979323846;

// Positions in [-1, 1]^2, one per row, in the order of pixels.
torch::Tensor grid(int64_t height, int64_t width) {
  const auto axis = [](int64_t n) {
    return (torch::arange(n) + 0.5) * (2.0 / static_cast<double>(n)) - 1.0;
  };
  const torch::Tensor y = axis(height).repeat_interleave(width);
  const torch::Tensor x = axis(width).repeat({height});
  return torch::stack({x, y}, 1).to(torch::kFloat);
}

// A smooth field of about a millimetre, in metres.
torch::Tensor displacement(const torch::Tensor& position) {
  const torch::Tensor x = position.select(1, 0);
  const torch::Tensor y = position.select(1, 1);
  const torch::Tensor bend = torch::sin(kPi * x) * torch::cos(kPi * y);
  const torch::Tensor twist = 0.5 * torch::sin(2.0 * kPi * x + 0.5) * torch::sin(kPi * y - 0.3);
  const torch::Tensor dent = torch::exp(-6.0 * ((x - 0.3).square() + (y + 0.2).square()));
  return (1e-3 * (bend + twist - 1.2 * dent)).unsqueeze(1);
}

// Fourier features: the position and its sines and cosines.
torch::Tensor features(const torch::Tensor& position, int64_t octaves) {
  std::vector<torch::Tensor> parts = {position};
  for (int64_t k = 0; k < octaves; ++k) {
    const double frequency = 0.5 * kPi * std::pow(octaves > 8 ? 1.6 : 1.3, static_cast<double>(k));
    parts.push_back(torch::sin(frequency * position));
    parts.push_back(torch::cos(frequency * position));
  }
  return torch::cat(parts, 1);
}

class NetworkImpl : public torch::nn::Module {
 public:
  NetworkImpl(int64_t in, int64_t out, const TrainConfig& config) {
    for (int64_t i = 0; i < config.depth; ++i) {
      hidden_.push_back(register_module("hidden" + std::to_string(i),
                                        Dense(i == 0 ? in : config.width, config.width, config)));
    }
    out_ = register_module("out", Dense(config.width, out, config));
    const torch::NoGradGuard no_grad;
    out_->weight.mul_(0.01);  // start near zero, as the field is
    out_->bias.mul_(0.01);
  }

  torch::Tensor forward(torch::Tensor x) {
    for (Dense& layer : hidden_) x = torch::tanh(fp32_on_cpu(layer->forward(x)));
    return fp32_on_cpu(out_->forward(x)).to(torch::kFloat);
  }

 private:
  std::vector<Dense> hidden_;
  Dense out_ = nullptr;
};
TORCH_MODULE(Network);

class Field : public Task {
 public:
  explicit Field(const TrainConfig& config) : device_(config.torch_device()), part_(config.part) {
    torch::manual_seed(config.seed);
    if (config.data.empty()) {
      height_ = width_ = kGrid;
      truth_ = displacement(grid(height_, width_));
      const torch::Tensor points = torch::rand({config.batch, 2}) * 2.0 - 1.0;
      batch_x_ = part_.of(features(points, octaves())).to(device_);
      batch_y_ = part_.of(displacement(points)).to(device_);
    } else {
      const Picture image = read_png(config.data);
      height_ = image.height;
      width_ = image.width;
      truth_ = torch::tensor(image.values).reshape({height_ * width_, 3});
      batch_ = std::min(config.batch, height_ * width_ / part_.ranks * part_.ranks);
    }
    positions_ = grid(height_, width_).to(device_);
    truth_ = truth_.to(device_);
    network_ = Network(2 + 4 * octaves(), truth_.size(1), config);
    generator_ = torch::make_generator<at::CPUGeneratorImpl>(config.seed);
  }

  torch::nn::Module& model() override { return *network_; }

  void next_batch() override {
    if (batch_ == 0) return;  // the built-in field always uses the same points
    const torch::Tensor chosen =
        part_.of(torch::randint(truth_.size(0), {batch_}, generator_)).to(device_);
    batch_x_ = features(positions_.index_select(0, chosen), octaves());
    batch_y_ = truth_.index_select(0, chosen);
  }

  torch::Tensor loss(int64_t) override {
    return torch::mse_loss(network_->forward(batch_x_), batch_y_);
  }

  std::string data_position() const override { return random_state(generator_); }
  void set_data_position(const std::string& text) override { set_random_state(generator_, text); }

  Score score() override {
    const torch::Tensor error = (fitted() - truth_).square().mean().to(torch::kDouble);
    const double mse = error.item<double>();
    if (!is_image()) return {mse, 1.0 - mse / truth_.to(torch::kDouble).var(false).item<double>()};
    return {mse, -10.0 * std::log10(mse)};
  }

  std::string metric_name() const override { return is_image() ? "PSNR" : "R2"; }
  Picture target() override { return picture(truth_); }
  Picture result() override { return picture(fitted()); }

 private:
  bool is_image() const { return batch_ > 0; }
  int64_t octaves() const { return is_image() ? 12 : 8; }

  torch::Tensor fitted() {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> parts;
    for (const torch::Tensor& part : positions_.split(1 << 15)) {
      parts.push_back(network_->forward(features(part, octaves())));
    }
    return torch::cat(parts);
  }

  Picture picture(const torch::Tensor& values) const {
    const torch::Tensor flat = values.cpu().contiguous().to(torch::kFloat);
    const float* const data = flat.data_ptr<float>();
    return {height_, width_, flat.size(1), {data, data + flat.numel()}};
  }

  torch::Device device_;
  Part part_;
  int64_t height_ = 0;
  int64_t width_ = 0;
  int64_t batch_ = 0;  // pixels of a batch; 0 for the built-in field
  torch::Tensor truth_, positions_, batch_x_, batch_y_;
  torch::Generator generator_;
  Network network_ = nullptr;
};

}  // namespace

std::unique_ptr<Task> make_field(const TrainConfig& config) {
  return std::make_unique<Field>(config);
}

}  // namespace headroom::cli
