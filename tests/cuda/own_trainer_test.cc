// What a trainer in CUDA uses: the scale and the verdict on the device, views of its pointers.
#include <headroom/cuda.h>

#include "tests/cuda/loop.h"

namespace headroom {
namespace {

// Loss and backward in one fused kernel read the scale where it is.
TEST_F(Cuda, TheScaleCanBeReadOnTheDevice) {
  Plain loop(true, DynamicScale{.growth_interval = 1});
  const float* const address = loop.scaler.device_scale();
  const auto there = [&] {
    float scale = 0.0f;
    EXPECT_EQ(cudaMemcpy(&scale, address, sizeof(scale), cudaMemcpyDefault), cudaSuccess);
    return scale;
  };
  EXPECT_EQ(there(), 65536.0f);
  for (unsigned step = 0; step < 3; ++step) {
    EXPECT_NO_THROW(loop.scaler.step(*loop.optimizer)) << "no scale() is needed";
    loop.scaler.update();
    EXPECT_EQ(there(), loop.scaler.get_scale());
  }
  EXPECT_EQ(loop.scaler.device_scale(), address);
  GradScaler on_cpu;
  expect_error(ErrorCode::kUnsupported, "device_scale()", [&] { on_cpu.device_scale(); });
}

// An optimizer of the user's own, which reads the verdict on the device. Instead of kernels it
// copies what it reads.
class OwnOnDevice : public Optimizer {
 public:
  explicit OwnOnDevice(std::vector<Parameter> parameters) : Optimizer(std::move(parameters)) {
    EXPECT_EQ(cudaMallocHost(&seen, sizeof(*seen)), cudaSuccess);
  }
  ~OwnOnDevice() override { cudaFreeHost(seen); }
  void apply(float, bool) override { ADD_FAILURE() << "the host was asked"; }
  bool apply_on_device(const DeviceVerdict* verdict, bool, void* stream) override {
    used_stream = stream;
    return cudaMemcpyAsync(seen, verdict, sizeof(*seen), cudaMemcpyDeviceToHost,
                           static_cast<cudaStream_t>(stream)) == cudaSuccess;
  }
  DeviceVerdict* seen = nullptr;
  void* used_stream = nullptr;
};

TEST_F(Cuda, AnOptimizerOfOnesOwnReadsTheVerdictOnTheDevice) {
  Host grad(DType::kF32, 1000, 3);
  OnDevice there(grad.view());
  OwnOnDevice optimizer({{"w", {}, there.view()}});
  GradScaler scaler(DynamicScale{.init_scale = 1024.0f}, {.device = kDevice});
  scaler.device_scale();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  cudaDeviceSynchronize();
  EXPECT_TRUE(scaler.step(optimizer, {.stream = stream}).pending);
  EXPECT_EQ(optimizer.used_stream, stream);
  cudaStreamSynchronize(stream);
  EXPECT_TRUE(optimizer.seen->apply);
  EXPECT_EQ(optimizer.seen->multiplier, 1.0f / 1024.0f);
  scaler.update(stream);

  grad.set(7, kNan);
  OnDevice bad(grad.view());
  optimizer.set_grad(0, bad.view());
  cudaDeviceSynchronize();
  scaler.step(optimizer, {.stream = stream});
  scaler.update(stream);
  cudaStreamSynchronize(stream);
  EXPECT_FALSE(optimizer.seen->apply);
  EXPECT_EQ(scaler.get_scale(), 512.0f);
  EXPECT_EQ(measure({bad.view()}).amax, 0.0) << "the gradients of a skipped step are cleared";
  cudaStreamDestroy(stream);
}

TEST_F(Cuda, ANormAboveTheLimitSkipsTheStepOnTheDevice) {
  expect_same_on_both(with(DynamicScale{.growth_interval = 1}), [](Plain& loop) {
    for (unsigned step = 0; step < 6; ++step) {
      loop.backward(step, step % 2 == 0 ? 1.0 : 1000.0);
      loop.step({.skip_above_norm = 100.0f});
      loop.update();
    }
    EXPECT_EQ(loop.scaler.state().skipped(), 0) << "no overflow";
  });
}

TEST_F(Cuda, ViewsFindTheirDeviceFromThePointer) {
  Host host(DType::kF16, 100, 1);
  OnDevice there(host.view());
  const TensorView found = device_view(static_cast<__half*>(there.view().data), 100);
  EXPECT_EQ(found.device.type, DeviceType::kCUDA);
  EXPECT_EQ(found.device.index, 0);
  EXPECT_EQ(found.dtype, DType::kF16);
  EXPECT_TRUE(measure({found}).finite());
  float on_stack = 0.0f;
  expect_error(ErrorCode::kInvalidArgument, "host memory", [&] { device_view(&on_stack, 1); });
}

}  // namespace
}  // namespace headroom
