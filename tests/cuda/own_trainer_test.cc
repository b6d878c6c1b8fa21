// The API for trainers with their own CUDA kernels: the scale and the verdict on the device, and
// views of raw device pointers.
#include <headroom/cuda.h>

#include "tests/cuda/loop.h"

namespace headroom {
namespace {

// A fused loss and backward kernel reads the scale from device memory; scale() is not called.
TEST_F(Cuda, ScaleCanBeReadOnTheDevice) {
  AdamWLoop loop(true, DynamicScale{.growth_interval = 1});
  const float* const address = loop.scaler.device_scale();
  const auto read_scale = [&] {
    float scale = 0.0f;
    EXPECT_EQ(cudaMemcpy(&scale, address, sizeof(scale), cudaMemcpyDefault), cudaSuccess);
    return scale;
  };
  EXPECT_EQ(read_scale(), 65536.0f);
  for (unsigned step = 0; step < 3; ++step) {
    EXPECT_NO_THROW(loop.scaler.step(*loop.optimizer)) << "scale() is not required";
    loop.scaler.update();
    EXPECT_EQ(read_scale(), loop.scaler.get_scale());
  }
  EXPECT_EQ(loop.scaler.device_scale(), address);
  GradScaler on_cpu;
  expect_error(ErrorCode::kUnsupported, "device_scale()", [&] { on_cpu.device_scale(); });
}

// A user's optimizer that copies the device verdict to the host instead of running kernels.
class VerdictReader : public Optimizer {
 public:
  explicit VerdictReader(std::vector<Parameter> parameters) : Optimizer(std::move(parameters)) {
    EXPECT_EQ(cudaMallocHost(&host_verdict, sizeof(*host_verdict)), cudaSuccess);
  }
  ~VerdictReader() override { cudaFreeHost(host_verdict); }
  void apply(float, bool) override { ADD_FAILURE() << "apply() was called on the host"; }
  bool apply_on_device(const DeviceVerdict* verdict, bool, void* stream) override {
    used_stream = stream;
    return cudaMemcpyAsync(host_verdict, verdict, sizeof(*host_verdict), cudaMemcpyDeviceToHost,
                           static_cast<cudaStream_t>(stream)) == cudaSuccess;
  }
  DeviceVerdict* host_verdict = nullptr;
  void* used_stream = nullptr;
};

TEST_F(Cuda, UserOptimizerReadsTheVerdictOnTheDevice) {
  HostTensor grad(DType::kF32, 1000, 3);
  DeviceCopy device(grad.view());
  VerdictReader optimizer({{"w", {}, device.view()}});
  GradScaler scaler(DynamicScale{.init_scale = 1024.0f}, {.device = kDevice});
  scaler.device_scale();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  cudaDeviceSynchronize();
  EXPECT_TRUE(scaler.step(optimizer, {.stream = stream}).pending);
  EXPECT_EQ(optimizer.used_stream, stream);
  cudaStreamSynchronize(stream);
  EXPECT_TRUE(optimizer.host_verdict->apply);
  EXPECT_EQ(optimizer.host_verdict->multiplier, 1.0f / 1024.0f);
  scaler.update(stream);

  grad.set(7, kNan);
  DeviceCopy bad(grad.view());
  optimizer.set_grad(0, bad.view());
  cudaDeviceSynchronize();
  scaler.step(optimizer, {.stream = stream});
  scaler.update(stream);
  cudaStreamSynchronize(stream);
  EXPECT_FALSE(optimizer.host_verdict->apply);
  EXPECT_EQ(scaler.get_scale(), 512.0f);
  EXPECT_EQ(measure({bad.view()}).amax, 0.0) << "the gradients of a skipped step are cleared";
  cudaStreamDestroy(stream);
}

TEST_F(Cuda, NormAboveTheLimitSkipsTheDeviceStep) {
  expect_device_matches_cpu(loop_with(DynamicScale{.growth_interval = 1}), [](AdamWLoop& loop) {
    for (unsigned step = 0; step < 6; ++step) {
      loop.backward(step, step % 2 == 0 ? 1.0 : 1000.0);
      loop.step({.skip_above_norm = 100.0f});
      loop.update();
    }
    EXPECT_EQ(loop.scaler.state().skipped(), 0) << "a norm above the limit is not an overflow";
  });
}

TEST_F(Cuda, DeviceViewDetectsTheDevice) {
  HostTensor host(DType::kF16, 100, 1);
  DeviceCopy device(host.view());
  const TensorView found = device_view(static_cast<__half*>(device.view().data), 100);
  EXPECT_EQ(found.device.type, DeviceType::kCUDA);
  EXPECT_EQ(found.device.index, 0);
  EXPECT_EQ(found.dtype, DType::kF16);
  EXPECT_TRUE(measure({found}).finite());
  float on_stack = 0.0f;
  expect_error(ErrorCode::kInvalidArgument, "host memory", [&] { device_view(&on_stack, 1); });
}

}  // namespace
}  // namespace headroom
