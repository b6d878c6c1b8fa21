#include "cli/train/layers.h"

#include <headroom/libtorch.h>

#include <cmath>

namespace headroom::cli {
namespace {

// With FP32 parameters, autocast casts the inputs of the operation; otherwise inputs must have the
// type of the parameters.
torch::Tensor like_weight(const torch::Tensor& x, const torch::Tensor& weight) {
  return weight.scalar_type() == torch::kFloat ? x : libtorch::cast(x, weight.scalar_type());
}

torch::Tensor fp32(const torch::Tensor& tensor) { return libtorch::cast(tensor, torch::kFloat); }

}  // namespace

torch::Tensor fp32_on_cpu(const torch::Tensor& tensor) {
  return tensor.is_cpu() ? fp32(tensor) : tensor;
}

torch::Tensor fake_quantized(const torch::Tensor& tensor) {
  const torch::Tensor values = fp32(tensor);
  const torch::Tensor scale = (values.detach().abs().max() / 127.0).clamp_min(1e-12);
  const torch::Tensor zero = torch::zeros({}, scale.options().dtype(torch::kInt));
  const torch::Tensor rounded =
      torch::fake_quantize_per_tensor_affine(values, scale, zero, -127, 127);
  return libtorch::cast(rounded, tensor.scalar_type());
}

DenseImpl::DenseImpl(int64_t in, int64_t out, const TrainConfig& config)
    : quantize_(!config.fake_quant.empty()) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  weight = register_parameter("weight", torch::empty({out, in}).uniform_(-bound, bound));
  bias = register_parameter("bias", torch::empty({out}).uniform_(-bound, bound));
}

torch::Tensor DenseImpl::forward(const torch::Tensor& x) {
  const torch::Tensor in = like_weight(x, weight);
  if (!quantize_) return libtorch::linear(in, weight, bias);
  return libtorch::linear(fake_quantized(in), fake_quantized(weight), bias);
}

ConvImpl::ConvImpl(int64_t in, int64_t out) {
  const double bound = std::sqrt(2.0 / static_cast<double>(9 * in));
  weight_ = register_parameter("weight", torch::randn({out, in, 3, 3}) * bound);
}

torch::Tensor ConvImpl::forward(const torch::Tensor& x) {
  return libtorch::conv2d(like_weight(x, weight_), weight_, {}, 1, 1);
}

NormImpl::NormImpl(int64_t width) {
  weight_ = register_parameter("weight", torch::ones({width}));
  bias_ = register_parameter("bias", torch::zeros({width}));
}

torch::Tensor NormImpl::forward(const torch::Tensor& x) {
  return torch::layer_norm(fp32(x), weight_.sizes(), fp32(weight_), fp32(bias_));
}

BatchNormImpl::BatchNormImpl(int64_t channels) {
  weight_ = register_parameter("weight", torch::ones({channels}));
  bias_ = register_parameter("bias", torch::zeros({channels}));
  mean_ = register_buffer("mean", torch::zeros({channels}));
  variance_ = register_buffer("variance", torch::ones({channels}));
}

torch::Tensor BatchNormImpl::forward(const torch::Tensor& x) {
  return torch::batch_norm(fp32(x), fp32(weight_), fp32(bias_), mean_, variance_, is_training(),
                           0.1, 1e-5, true);
}

void set_parameter_types(torch::nn::Module& model, OptLevel level, torch::ScalarType dtype) {
  if (level != OptLevel::kO2 && level != OptLevel::kO3) return;
  for (const auto& module : model.modules()) {
    const bool norm = module->as<NormImpl>() != nullptr || module->as<BatchNormImpl>() != nullptr;
    if (norm && level == OptLevel::kO2) continue;
    for (torch::Tensor& parameter : module->parameters(false)) {
      parameter.set_data(parameter.data().to(dtype));
    }
  }
}

}  // namespace headroom::cli
