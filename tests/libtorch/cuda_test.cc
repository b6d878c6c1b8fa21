// The adapter on CUDA tensors: the same results as on the CPU.
#include <cmath>
#include <sstream>

#include "tests/libtorch/support.h"

#ifdef HEADROOM_TORCH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace headroom::libtorch {
namespace {

class OnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available() || !cuda_available()) {
      GTEST_SKIP() << "there is no CUDA device here";
    }
  }
};

torch::nn::Sequential model_on(torch::Device device, torch::ScalarType dtype) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(33, 70), torch::nn::Linear(70, 2));
  model->to(device, dtype);
  return model;
}

void set_grads(const torch::nn::Sequential& model, int step, bool bad) {
  torch::manual_seed(100 + step);
  for (torch::Tensor& parameter : model->parameters()) {
    torch::Tensor grad = torch::randn(parameter.sizes()) * 1000.0;
    if (bad) grad.view(-1)[0] = std::numeric_limits<float>::infinity();
    parameter.mutable_grad() = grad.to(parameter.scalar_type()).to(parameter.device());
  }
}

template <typename Optimizer, typename Options>
void expect_same(torch::ScalarType dtype, const Options& options, double tolerance) {
  auto here = model_on(torch::kCPU, dtype), there = model_on(torch::kCUDA, dtype);
  Optimizer cpu(here->parameters(), options), cuda(there->parameters(), options);
  GradScaler a(GradScalerOptions().init_scale(1024)), b(GradScalerOptions().init_scale(1024));
  b.name_parameters(*there);
  for (int step = 0; step < 10; ++step) {
    const bool bad = step == 0 || step == 4;
    set_grads(here, step, bad);
    set_grads(there, step, bad);
    a.scale(torch::ones({}));
    b.scale(torch::ones({}, torch::kCUDA));
    EXPECT_EQ(a.step(cpu).applied, !bad);
    const StepReport report = b.step(cuda);
    EXPECT_EQ(report.applied, !bad);
    EXPECT_EQ(report.culprit, bad ? "0.weight: 1 inf, 0 nan" : "");
    a.update();
    b.update();
    EXPECT_EQ(a.get_scale(), b.get_scale());
  }
  for (size_t i = 0; i < here->parameters().size(); ++i) {
    EXPECT_TRUE(torch::allclose(here->parameters()[i].to(torch::kFloat),
                                there->parameters()[i].cpu().to(torch::kFloat), tolerance,
                                tolerance));
  }
}

TEST_F(OnCuda, FusedOptimizersGiveTheCpusBits) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    expect_same<FusedAdamW>(dtype, torch::optim::AdamWOptions(0.01), 0.0);
    expect_same<FusedSGD>(dtype, torch::optim::SGDOptions(0.01).momentum(0.9), 0.0);
  }
}

TEST_F(OnCuda, TorchsOwnOptimizersWork) {
  expect_same<torch::optim::AdamW>(torch::kFloat, torch::optim::AdamWOptions(0.01), 1e-5);
  expect_same<torch::optim::SGD>(torch::kHalf, torch::optim::SGDOptions(0.01), 1e-2);
}

TEST_F(OnCuda, FilesGoFromDeviceToHost) {
  auto there = model_on(torch::kCUDA, torch::kHalf), here = model_on(torch::kCPU, torch::kHalf);
  FusedAdamW cuda(there->parameters(), torch::optim::AdamWOptions(0.01));
  FusedAdamW cpu(here->parameters(), torch::optim::AdamWOptions(0.01));
  set_grads(there, 1, false);
  cuda.step();
  std::stringstream file;
  torch::save(cuda, file);
  torch::load(cpu, file);
  for (size_t i = 0; i < here->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(cpu.master_params()[i], cuda.master_params()[i].cpu()));
    EXPECT_TRUE(same_bits(here->parameters()[i], there->parameters()[i].cpu()));
  }
}

TEST_F(OnCuda, AutocastAndALoopInFp16) {
  auto model = model_on(torch::kCUDA, torch::kFloat);
  FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  GradScaler scaler;
  torch::manual_seed(1);
  const torch::Tensor x = torch::randn({64, 33}, torch::kCUDA);
  const torch::Tensor y = x.narrow(1, 0, 2);
  double first = 0.0, last = 0.0;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const Autocast scope(torch::kCUDA, torch::kHalf);
      const torch::Tensor out = model->forward(x);
      EXPECT_EQ(out.scalar_type(), torch::kHalf);
      loss = torch::mse_loss(out, y);
      EXPECT_EQ(loss.scalar_type(), torch::kFloat);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer, {1.0f});
    scaler.update();
    (step == 0 ? first : last) = value(loss);
  }
  EXPECT_LT(last, 0.05 * first);
}

#ifdef HEADROOM_TORCH_CUDA
TEST_F(OnCuda, WorksOnTheCurrentStream) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  expect_same<FusedAdamW>(torch::kHalf, torch::optim::AdamWOptions(0.01), 0.0);
}
#endif

}  // namespace
}  // namespace headroom::libtorch
