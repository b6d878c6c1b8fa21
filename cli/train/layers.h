// Layers that run at every opt level: products in 16 bits, everything else in FP32 on the CPU.
#ifndef HEADROOM_CLI_TRAIN_LAYERS_H_
#define HEADROOM_CLI_TRAIN_LAYERS_H_

#include <torch/torch.h>

#include "cli/train/config.h"

namespace headroom::cli {

/// For ops that LibTorch's CPU has in FP32 only (or does badly in 16 bits): FP32 there, as it is on
/// CUDA.
torch::Tensor wide(const torch::Tensor& tensor);

/// Rounds to 8-bit integers times a scale and back; gradients go straight through.
torch::Tensor fake_quantized(const torch::Tensor& tensor);

class DenseImpl : public torch::nn::Module {
 public:
  DenseImpl(int64_t in, int64_t out, const TrainConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight, bias;

 private:
  bool quantize_;
};
TORCH_MODULE(Dense);

/// A 3x3 convolution that keeps the image's size.
class ConvImpl : public torch::nn::Module {
 public:
  ConvImpl(int64_t in, int64_t out);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::Tensor weight_;
};
TORCH_MODULE(Conv);

/// Layer norm over the last dimension, in FP32 whatever its parameters are.
class NormImpl : public torch::nn::Module {
 public:
  explicit NormImpl(int64_t width);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::Tensor weight_, bias_;
};
TORCH_MODULE(Norm);

/// Batch norm over images, likewise.
class BatchNormImpl : public torch::nn::Module {
 public:
  explicit BatchNormImpl(int64_t channels);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::Tensor weight_, bias_, mean_, variance_;
};
TORCH_MODULE(BatchNorm);

/// Turns the parameters into 16-bit ones as the opt level says. Norms are told by their type.
void set_parameter_types(torch::nn::Module& model, OptLevel level, torch::ScalarType dtype);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_LAYERS_H_
