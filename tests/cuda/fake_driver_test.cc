// Every function that takes views rejects those whose memory is on another device than they claim,
// before it reads anything. The driver is a fake and the "device memory" is host memory, so a call
// with a missing check succeeds instead of crashing.
#include "tests/cuda/fake_driver.h"

#include <dlpack/dlpack.h>
#include <headroom/inspect.h>

#include "tests/support.h"

namespace headroom {
namespace {

constexpr Device kCuda0{DeviceType::kCUDA, 0};

class MemoryLocation : public testing::Test {
 protected:
  MemoryLocation() : device_memory(64, 1.0f), weight(64, 1.0f), grad(64, 1.0f) {
    fake_driver_add(device_memory.data(), device_memory.size() * sizeof(float), FakeKind::kDevice,
                    1);
  }
  ~MemoryLocation() override { fake_driver_clear(); }

  static void expect_rejected(const std::string& name, const std::function<void()>& call) {
    expect_error(ErrorCode::kInvalidArgument,
                 name + " is memory of CUDA device 1, but its view says CPU", call);
  }
  static TensorView on(const Device& device, std::vector<float>& values) {
    return view(values.data(), DType::kF32, static_cast<int64_t>(values.size()), device);
  }

  std::vector<float> device_memory;  // on device 1 according to the fake driver
  std::vector<float> weight, grad;
};

TEST_F(MemoryLocation, OptimizersRejectDeviceMemoryInCpuViews) {
  expect_rejected("The weight of Parameter 'w'", [&] {
    AdamW optimizer({{"w", view(device_memory), view(grad)}});
  });
  expect_rejected("The gradient of Parameter 'w'", [&] {
    AdamW optimizer({{"w", view(weight), view(device_memory)}});
  });
  AdamW optimizer({{"w", view(weight), view(grad)}});
  std::vector<float> other_grad(64);
  expect_rejected("The weight of Parameter 'v'", [&] {
    optimizer.add_group({{"v", view(device_memory), view(other_grad)}}, {});
  });
  expect_rejected("The gradient of Parameter 'w'",
                  [&] { optimizer.set_grad(0, view(device_memory)); });
  expect_rejected("The gradient of Parameter 'w'", [&] {
    optimizer.rebind({{"w", view(weight), view(device_memory)}});
  });
  expect_rejected("The weight of Parameter 'w'", [&] {
    optimizer.rebind({{"w", view(device_memory), view(grad)}});
  });
  EXPECT_EQ(optimizer.parameters().size(), 1u);
  EXPECT_EQ(optimizer.parameters()[0].weight.data, weight.data());
  EXPECT_EQ(optimizer.parameters()[0].grad.data, grad.data());
  OptimizerState state = optimizer.state();
  state.tensors[0].tensor = view(device_memory);
  expect_error(ErrorCode::kBadState, "Saved tensor 'w/exp_avg' is memory of CUDA device 1",
               [&] { optimizer.load_state(state); });
}

TEST_F(MemoryLocation, DlpackExportRejectsDeviceMemoryInCpuViews) {
  const TensorView right = on({DeviceType::kCUDA, 1}, device_memory);
  DLManagedTensor* const managed = to_dlpack(right);
  EXPECT_EQ(managed->dl_tensor.device.device_type, kDLCUDA);
  EXPECT_EQ(managed->dl_tensor.device.device_id, 1);
  managed->deleter(managed);
  expect_rejected("The view", [&] { to_dlpack(view(device_memory)); });
}

TEST_F(MemoryLocation, FunctionsRejectDeviceMemoryInCpuViews) {
  expect_rejected("Gradient 1", [&] { measure({view(weight), view(device_memory)}); });
  expect_rejected("Gradient 1", [&] { unscale_({view(weight), view(device_memory)}, 0.5f); });
  EXPECT_EQ(weight[0], 1.0f) << "no tensor was changed";
  expect_rejected("The source", [&] { convert(view(device_memory), view(weight)); });
  expect_rejected("The target", [&] { convert(view(weight), view(device_memory)); });
  GradScaler scaler;
  expect_rejected("The loss", [&] { scaler.scale(view(device_memory), view(weight)); });
  expect_rejected("The scaled loss", [&] { scaler.scale(view(weight), view(device_memory)); });
  Magnitudes magnitudes;
  expect_rejected("The gradient", [&] { magnitudes.add(view(device_memory)); });
  EXPECT_EQ(device_memory, std::vector<float>(64, 1.0f));
}

TEST_F(MemoryLocation, HostMemoryInCudaViewsIsRejected) {
  const TensorView claimed = on(kCuda0, weight), other = on(kCuda0, grad);
  const std::string part = " is host memory that CUDA device 0 cannot reach";
  expect_error(ErrorCode::kInvalidArgument, "The weight of Parameter 'w'" + part, [&] {
    SGD optimizer({{"w", claimed, other}});
  });
  expect_error(ErrorCode::kInvalidArgument, "Gradient 0" + part, [&] { measure({claimed}); });
  expect_error(ErrorCode::kInvalidArgument, "The source" + part, [&] { convert(claimed, other); });
  GradScaler scaler;
  expect_error(ErrorCode::kInvalidArgument, "The loss" + part,
               [&] { scaler.scale(claimed, other); });
}

TEST_F(MemoryLocation, MemoryOfAnotherDeviceIsRejected) {
  expect_error(ErrorCode::kInvalidArgument,
               "Gradient 0 is memory of CUDA device 1, but its view says CUDA device 0",
               [&] { measure({on(kCuda0, device_memory)}); });
}

TEST_F(MemoryLocation, PinnedAndManagedMemoryIsAcceptedInCpuViews) {
  for (const FakeKind kind : {FakeKind::kPinned, FakeKind::kManaged}) {
    fake_driver_clear();
    for (const auto* values : {&weight, &grad}) {
      fake_driver_add(values->data(), values->size() * sizeof(float), kind, 0);
    }
    AdamW optimizer({{"w", view(weight), view(grad)}});
    optimizer.apply(1.0f, false);
    EXPECT_EQ(measure({view(grad)}).count, 64);
  }
  EXPECT_LT(weight[0], 1.0f);
}

TEST_F(MemoryLocation, StepsDoNotQueryTheDriver) {
  AdamW optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  const int before = fake_driver_queries();
  EXPECT_GE(before, 2) << "the fake driver counts queries";
  for (int i = 0; i < 3; ++i) {
    scaler.scale(1.0f);
    if (i == 1) scaler.unscale_(optimizer);
    scaler.step(optimizer, {.max_norm = 1.0f});
    scaler.update();
  }
  optimizer.rebind({{"w", view(weight), view(grad)}});
  EXPECT_EQ(fake_driver_queries(), before);
}

TEST_F(MemoryLocation, EmptyTensorsAreNotChecked) {
  TensorView empty = view(device_memory.data(), 0);
  EXPECT_EQ(measure({empty}).count, 0);
  empty.device = kCuda0;
  empty.data = weight.data();
  SGD optimizer({{"w", empty, TensorView{}}});
  EXPECT_EQ(optimizer.parameters().size(), 1u);
}

}  // namespace
}  // namespace headroom
