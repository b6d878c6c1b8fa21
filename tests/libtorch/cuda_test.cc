// The LibTorch binding on CUDA tensors gives the same results as on the CPU.
#include <cmath>
#include <sstream>

#include "adapters/libtorch/tensors.h"
#include "tests/libtorch/support.h"

#ifdef HEADROOM_TORCH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace headroom::libtorch {
namespace {

class OnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available() || !cuda_available()) {
      GTEST_SKIP() << "no CUDA device";
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

TEST(CoreDevice, CudaWithoutAnIndexIsTheCurrentDevice) {
  const auto expect = [](const torch::Device& device, int current, const Device& expected) {
    const Device found = internal::core_device(device, current);
    EXPECT_EQ(found.type, expected.type);
    EXPECT_EQ(found.index, expected.index);
  };
  expect(torch::kCUDA, 0, {DeviceType::kCUDA, 0});
  expect(torch::kCUDA, 3, {DeviceType::kCUDA, 3});
  expect(torch::Device(torch::kCUDA, 0), 3, {DeviceType::kCUDA, 0});
  expect(torch::Device(torch::kCUDA, 2), 3, {DeviceType::kCUDA, 2});
  expect(torch::kCPU, 3, {DeviceType::kCPU, 0});
}

// Trains on the CPU and on CUDA and compares the weights. `scaler_device` holds the state of the
// CUDA run's scaler.
template <typename Optimizer, typename Options>
void expect_cuda_matches_cpu(torch::ScalarType dtype, const Options& options, double tolerance,
                             torch::Device scaler_device = torch::kCPU) {
  auto cpu_model = model_on(torch::kCPU, dtype), cuda_model = model_on(torch::kCUDA, dtype);
  Optimizer cpu(cpu_model->parameters(), options), cuda(cuda_model->parameters(), options);
  GradScaler a(GradScalerOptions().init_scale(1024)),
      b(GradScalerOptions().init_scale(1024).device(scaler_device));
  b.name_parameters(*cuda_model);
  for (int step = 0; step < 10; ++step) {
    const bool bad = step == 0 || step == 4;
    set_grads(cpu_model, step, bad);
    set_grads(cuda_model, step, bad);
    a.scale(torch::ones({}));
    b.scale(torch::ones({}, torch::kCUDA));
    EXPECT_EQ(a.step(cpu).applied, !bad);
    StepReport report = b.step(cuda);
    if (report.pending) report = b.report();
    EXPECT_EQ(report.applied, !bad);
    EXPECT_EQ(report.culprit, bad ? "0.weight: 1 inf, 0 nan" : "");
    a.update();
    b.update();
    EXPECT_EQ(a.get_scale(), b.get_scale());
  }
  for (size_t i = 0; i < cpu_model->parameters().size(); ++i) {
    EXPECT_TRUE(torch::allclose(cpu_model->parameters()[i].to(torch::kFloat),
                                cuda_model->parameters()[i].cpu().to(torch::kFloat), tolerance,
                                tolerance));
  }
}

TEST_F(OnCuda, FusedOptimizersMatchTheCpuBitwise) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    expect_cuda_matches_cpu<FusedAdamW>(dtype, torch::optim::AdamWOptions(0.01), 0.0);
    expect_cuda_matches_cpu<FusedSGD>(dtype, torch::optim::SGDOptions(0.01).momentum(0.9), 0.0);
  }
}

TEST_F(OnCuda, TorchOptimizersMatchTheCpu) {
  expect_cuda_matches_cpu<torch::optim::AdamW>(torch::kFloat, torch::optim::AdamWOptions(0.01),
                                               1e-5);
  expect_cuda_matches_cpu<torch::optim::SGD>(torch::kHalf, torch::optim::SGDOptions(0.01), 1e-2);
}

TEST_F(OnCuda, DeviceScalerMatchesTheCpu) {
  const torch::Device cuda = torch::kCUDA;
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    expect_cuda_matches_cpu<FusedAdamW>(dtype, torch::optim::AdamWOptions(0.01), 0.0, cuda);
    expect_cuda_matches_cpu<FusedSGD>(dtype, torch::optim::SGDOptions(0.01).momentum(0.9), 0.0,
                                      cuda);
  }
  expect_cuda_matches_cpu<torch::optim::AdamW>(torch::kFloat, torch::optim::AdamWOptions(0.01),
                                               1e-5, cuda);
}

TEST_F(OnCuda, BackwardOfALossWithAnOldScaleIsRejected) {
  GradScaler scaler(GradScalerOptions().device(torch::kCUDA));
  const torch::Tensor x = torch::ones({}, torch::kCUDA).requires_grad_(true);
  const torch::Tensor loss = x * x;
  const torch::Tensor scaled = scaler.scale(loss);
  EXPECT_EQ(scaled.item<double>(), 65536.0);
  scaler.discard();
  scaler.update(1024.0);
  EXPECT_EQ(scaled.item<double>(), 65536.0);
  expect_error(ErrorCode::kWrongOrder, "before update()", [&] { scaled.backward(); });
  EXPECT_EQ(scaler.scale(loss.to(torch::kHalf)).item<double>(), 1024.0);
}

TEST_F(OnCuda, OptimizerFilesLoadOnTheCpu) {
  auto cuda_model = model_on(torch::kCUDA, torch::kHalf),
       cpu_model = model_on(torch::kCPU, torch::kHalf);
  FusedAdamW cuda(cuda_model->parameters(), torch::optim::AdamWOptions(0.01));
  FusedAdamW cpu(cpu_model->parameters(), torch::optim::AdamWOptions(0.01));
  set_grads(cuda_model, 1, false);
  cuda.step();
  std::stringstream file;
  torch::save(cuda, file);
  torch::load(cpu, file);
  for (size_t i = 0; i < cpu_model->parameters().size(); ++i) {
    const torch::NoGradGuard no_grad;
    cpu_model->parameters()[i].copy_(
        cuda_model->parameters()[i]);  // as loading the model's file would
  }
  for (size_t i = 0; i < cpu_model->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(cpu.master_params()[i], cuda.master_params()[i].cpu()));
  }
}

TEST_F(OnCuda, Fp16AutocastTrainingConverges) {
  auto model = model_on(torch::kCUDA, torch::kFloat);
  FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  GradScaler scaler(GradScalerOptions().device(torch::kCUDA));
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
TEST_F(OnCuda, TrainingStepCanBeCapturedInAGraph) {
  const auto run = [](bool graphed) {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    auto model = model_on(torch::kCUDA, torch::kFloat);
    FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
    GradScaler scaler(GradScalerOptions().growth_interval(7).device(torch::kCUDA));
    const torch::Tensor x = torch::empty({64, 33}, torch::kCUDA);
    const auto step = [&] {
      for (torch::Tensor& parameter : model->parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad().zero_();
      }
      const torch::Tensor loss = torch::mse_loss(model->forward(x), x.narrow(1, 0, 2));
      scaler.scale(loss).backward();
      scaler.step(optimizer, {1.0f});
      scaler.update();
    };
    torch::manual_seed(5);
    at::cuda::CUDAGraph graph;
    for (int i = 0; i < 100; ++i) {
      x.copy_(torch::randn({64, 33}) * (i % 20 == 13 ? 1e30 : 1.0));
      if (graphed && i == 3) {
        graph.capture_begin();
        step();
        graph.capture_end();
      }
      if (graphed && i >= 3) {
        graph.replay();
      } else {
        step();
      }
    }
    EXPECT_EQ(scaler.state().skipped(), 5);
    EXPECT_EQ(scaler.state().steps(), 100);
    EXPECT_EQ(optimizer.steps(0), 95);
    std::vector<torch::Tensor> weights;
    for (const torch::Tensor& parameter : model->parameters()) {
      weights.push_back(parameter.detach().cpu());
    }
    return weights;
  };
  const auto eager = run(false), graphed = run(true);
  for (size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(same_bits(eager[i], graphed[i]));
}

TEST_F(OnCuda, UsesTorchsCurrentDeviceAndStream) {
  EXPECT_EQ(internal::current_cuda_device(), static_cast<int>(c10::cuda::current_device()));
  const int last = static_cast<int>(torch::cuda::device_count()) - 1;
  const auto device = static_cast<c10::DeviceIndex>(last);
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(false, device);
  {
    const c10::cuda::CUDAStreamGuard guard(stream);
    const c10::cuda::CUDAGuard elsewhere(c10::DeviceIndex{0});
    EXPECT_EQ(internal::torch_stream_of(last), stream.stream())
        << "the current stream of that device";
    EXPECT_EQ(internal::current_cuda_device(), 0);
  }
  EXPECT_EQ(internal::torch_stream_of(last), c10::cuda::getDefaultCUDAStream(device).stream());
}

// With several devices, the tensors are on the last device while the first one is current.
TEST_F(OnCuda, WorksOnANonCurrentDevice) {
  const auto last = static_cast<c10::DeviceIndex>(torch::cuda::device_count() - 1);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, last));
  const c10::cuda::CUDAGuard elsewhere(c10::DeviceIndex{0});
  const torch::Device cuda(torch::kCUDA, last);
  auto cpu_model = model_on(torch::kCPU, torch::kHalf), cuda_model = model_on(cuda, torch::kHalf);
  FusedAdamW cpu(cpu_model->parameters(), torch::optim::AdamWOptions(0.01));
  FusedAdamW gpu(cuda_model->parameters(), torch::optim::AdamWOptions(0.01));
  for (const torch::Device& scaler_device : {torch::Device(torch::kCPU), cuda}) {
    GradScaler a(GradScalerOptions().init_scale(1024));
    GradScaler b(GradScalerOptions().init_scale(1024).device(scaler_device));
    set_grads(cpu_model, 1, false);
    set_grads(cuda_model, 1, false);
    a.scale(torch::ones({}));
    b.scale(torch::ones({}, cuda));
    a.step(cpu);
    b.step(gpu);
    a.update();
    b.update();
    EXPECT_TRUE(b.report().applied);
  }
  for (size_t i = 0; i < cpu_model->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(cpu_model->parameters()[i], cuda_model->parameters()[i].cpu()));
  }
}

TEST_F(OnCuda, WorksOnTheCurrentStream) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  expect_cuda_matches_cpu<FusedAdamW>(torch::kHalf, torch::optim::AdamWOptions(0.01), 0.0);
}
#endif

TEST_F(OnCuda, AWatchedStepNamesTheFirstFaultyOperation) {
  torch::nn::Linear fc(4, 4);
  fc->to(torch::kCUDA, torch::kHalf);
  const auto x = torch::full({2, 4}, 100.0, torch::dtype(torch::kHalf).device(torch::kCUDA));
  torch::nn::init::constant_(fc->weight, 1.0);
  Watch watch(*fc);
  watch.begin();
  {
    const WatchScope scope("head");
    const torch::Tensor y = fc->forward(x);
    (y * y).sum().backward();
  }
  watch.finish();
  const RangeReport report(watch.rows());
  ASSERT_GE(report.first_bad(), 0);
  EXPECT_EQ(report.rows()[static_cast<size_t>(report.first_bad())].label(), "head: mul");
}

}  // namespace
}  // namespace headroom::libtorch
