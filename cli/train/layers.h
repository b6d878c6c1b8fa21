// Layers for every opt level: matrix products in 16 bits, on the CPU everything else in FP32.
#ifndef HEADROOM_CLI_TRAIN_LAYERS_H_
#define HEADROOM_CLI_TRAIN_LAYERS_H_

#include <torch/torch.h>

#include "cli/train/config.h"

namespace headroom::cli {

/// Casts to FP32 on the CPU, for operations that LibTorch has in FP32 only there, or that are
/// inaccurate in 16 bits. Returns the tensor itself on CUDA.
torch::Tensor fp32_on_cpu(const torch::Tensor& tensor);

/// Rounds to 8-bit integers times a scale and back. The gradient is that of the identity
/// (straight-through estimator).
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

/// Layer norm over the last dimension, computed in FP32 whatever the type of its parameters.
class NormImpl : public torch::nn::Module {
 public:
  explicit NormImpl(int64_t width);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::Tensor weight_, bias_;
};
TORCH_MODULE(Norm);

/// Batch norm over images, also in FP32.
class BatchNormImpl : public torch::nn::Module {
 public:
  explicit BatchNormImpl(int64_t channels);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::Tensor weight_, bias_, mean_, variance_;
};
TORCH_MODULE(BatchNorm);

/// Converts the parameters to 16 bits according to the opt level. O2 leaves norm layers in FP32.
void set_parameter_types(torch::nn::Module& model, OptLevel level, torch::ScalarType dtype);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_LAYERS_H_
