// examples/llmc/headroom_llmc.h on a model of llm.c's shape. What it needs of llm.c is declared
// here.
#include <headroom/cuda.h>

#include <cmath>

#include "tests/cuda/support.h"

namespace {

using floatX = __half;
constexpr int NUM_PARAMETER_TENSORS = 16;
constexpr size_t kTensor = 24;  // elements of a tensor, of all layers together

struct GPT2 {
  struct {
    int num_layers = 2;
  } config;
  void* params_memory = nullptr;
  void* grads_memory = nullptr;
  float* m_memory = nullptr;
  float* v_memory = nullptr;
  float* master_weights = nullptr;
  size_t num_parameters = NUM_PARAMETER_TENSORS * kTensor;
};

struct ShardInfo {
  ptrdiff_t offset;
  size_t size;
};

ShardInfo gpt2_get_tensor_at_layer(const GPT2* model, int layer, int tensor) {
  const size_t layers =
      tensor >= 2 && tensor <= 13 ? static_cast<size_t>(model->config.num_layers) : 1;
  const size_t size = kTensor / layers;
  return {static_cast<ptrdiff_t>(kTensor) * tensor + static_cast<ptrdiff_t>(size) * layer, size};
}

struct {
  int local_device_idx = 0;
} multi_gpu_config;

void cudaCheck(cudaError_t error) { ASSERT_EQ(error, cudaSuccess); }

}  // namespace

#include "examples/llmc/headroom_llmc.h"

namespace headroom {
namespace {

TEST_F(Cuda, LlmcTrainsInTheArraysOfTheTrainerAndSkipsOverflow) {
  constexpr auto kCount = static_cast<int64_t>(NUM_PARAMETER_TENSORS * kTensor);
  HostTensor weights(DType::kF16, kCount, 1), grads(DType::kF16, kCount, 2);
  const HostTensor floats(DType::kF32, kCount, 3);  // garbage: llm.c does not initialise its state
  const DeviceCopy weight(weights.view()), grad(grads.view());
  const DeviceCopy master(floats.view()), first(floats.view()), second(floats.view());
  GPT2 model;
  model.params_memory = weight.view().data;
  model.grads_memory = grad.view().data;
  model.m_memory = static_cast<float*>(first.view().data);
  model.v_memory = static_cast<float*>(second.view().data);
  model.master_weights = static_cast<float*>(master.view().data);
  ScaledAdamW optimizer(&model, 0.1f);
  EXPECT_NE(optimizer.scaler.device_scale(), nullptr);

  optimizer.step(1e-2f, nullptr);
  StepReport report = optimizer.scaler.report();
  EXPECT_TRUE(report.applied) << report.to_string();
  const std::vector<unsigned char> updated = weight.bytes(), masters = master.bytes();
  EXPECT_NE(updated, bytes_at(weights.view()));

  grads.set(kCount - 1, INFINITY);
  grad.write(grads.view());
  optimizer.step(1e-2f, nullptr);
  report = optimizer.scaler.report();
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.culprit, "lnfb0: 1 inf, 0 nan");
  EXPECT_EQ(weight.bytes(), updated);
  EXPECT_EQ(master.bytes(), masters);
}

}  // namespace
}  // namespace headroom
