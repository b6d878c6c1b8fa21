// Helpers of the tests of the LibTorch binding.
#ifndef HEADROOM_TESTS_LIBTORCH_SUPPORT_H_
#define HEADROOM_TESTS_LIBTORCH_SUPPORT_H_

#include <gtest/gtest.h>
#include <headroom/libtorch.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include "tests/support.h"

namespace headroom::libtorch {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline torch::Tensor leaf(std::vector<float> values, torch::ScalarType dtype = torch::kFloat) {
  return torch::tensor(values).to(dtype).requires_grad_(true);
}

inline double value(const torch::Tensor& tensor) { return tensor.item<double>(); }

/// True if both tensors have the same dtype, shape and bits.
inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  const torch::Tensor x = a.detach().contiguous();
  const torch::Tensor y = b.detach().contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

inline torch::optim::SGD sgd(std::vector<torch::Tensor> params, double lr = 1.0) {
  return torch::optim::SGD(std::move(params), torch::optim::SGDOptions(lr));
}

inline torch::nn::Sequential small_model(torch::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 2));
  model->to(dtype);
  return model;
}

inline void set_random_grads(const torch::nn::Sequential& model, int step) {
  torch::manual_seed(100 + step);
  for (torch::Tensor& parameter : model->parameters()) {
    parameter.mutable_grad() = torch::randn(parameter.sizes()).to(parameter.scalar_type());
  }
}

}  // namespace headroom::libtorch

#endif  // HEADROOM_TESTS_LIBTORCH_SUPPORT_H_
