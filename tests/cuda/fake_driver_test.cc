// Views whose memory is not where they say are refused wherever they enter the library, before
// anything is read. The driver is a fake: the "device memory" here is host memory, so that a check
// that is missing shows as a call that succeeds.
#include "tests/cuda/fake_driver.h"

#include <dlpack/dlpack.h>
#include <headroom/inspect.h>

#include "tests/support.h"

namespace headroom {
namespace {

constexpr Device kCuda0{DeviceType::kCUDA, 0};

class MemoryPlaces : public testing::Test {
 protected:
  MemoryPlaces() : there(64, 1.0f), weight(64, 1.0f), grad(64, 1.0f) {
    fake_driver_add(there.data(), there.size() * sizeof(float), FakeKind::kDevice, 1);
  }
  ~MemoryPlaces() override { fake_driver_clear(); }

  static void expect_refused(const std::string& name, const std::function<void()>& call) {
    expect_error(ErrorCode::kInvalidArgument,
                 name + " is memory of CUDA device 1, but its view says CPU", call);
  }
  static TensorView on(const Device& device, std::vector<float>& values) {
    return view(values.data(), DType::kF32, static_cast<int64_t>(values.size()), device);
  }

  std::vector<float> there;  // on device 1, says the driver
  std::vector<float> weight, grad;
};

TEST_F(MemoryPlaces, AnOptimizerRefusesDeviceMemoryThatIsCalledHostMemory) {
  expect_refused("The weight of Parameter 'w'", [&] {
    AdamW optimizer({{"w", view(there), view(grad)}});
  });
  expect_refused("The gradient of Parameter 'w'", [&] {
    AdamW optimizer({{"w", view(weight), view(there)}});
  });
  AdamW optimizer({{"w", view(weight), view(grad)}});
  std::vector<float> other_grad(64);
  expect_refused("The weight of Parameter 'v'", [&] {
    optimizer.add_group({{"v", view(there), view(other_grad)}}, {});
  });
  expect_refused("The gradient of Parameter 'w'", [&] { optimizer.set_grad(0, view(there)); });
  expect_refused("The gradient of Parameter 'w'", [&] {
    optimizer.rebind({{"w", view(weight), view(there)}});
  });
  expect_refused("The weight of Parameter 'w'", [&] {
    optimizer.rebind({{"w", view(there), view(grad)}});
  });
  EXPECT_EQ(optimizer.parameters().size(), 1u);
  EXPECT_EQ(optimizer.parameters()[0].weight.data, weight.data());
  EXPECT_EQ(optimizer.parameters()[0].grad.data, grad.data());
  OptimizerState state = optimizer.state();
  state.tensors[0].tensor = view(there);
  expect_error(ErrorCode::kBadState, "Saved tensor 'w/exp_avg' is memory of CUDA device 1",
               [&] { optimizer.load_state(state); });
}

TEST_F(MemoryPlaces, DlpackPassesOnMemoryThatIsWhereItsViewSays) {
  const TensorView right = on({DeviceType::kCUDA, 1}, there);
  DLManagedTensor* const managed = to_dlpack(right);
  EXPECT_EQ(managed->dl_tensor.device.device_type, kDLCUDA);
  EXPECT_EQ(managed->dl_tensor.device.device_id, 1);
  managed->deleter(managed);
  expect_refused("The view", [&] { to_dlpack(view(there)); });
}

TEST_F(MemoryPlaces, CallsThatTakeViewsRefuseDeviceMemoryThatIsCalledHostMemory) {
  expect_refused("Gradient 1", [&] { measure({view(weight), view(there)}); });
  expect_refused("Gradient 1", [&] { unscale_({view(weight), view(there)}, 0.5f); });
  EXPECT_EQ(weight[0], 1.0f) << "nothing was changed";
  expect_refused("The source", [&] { convert(view(there), view(weight)); });
  expect_refused("The target", [&] { convert(view(weight), view(there)); });
  GradScaler scaler;
  expect_refused("The loss", [&] { scaler.scale(view(there), view(weight)); });
  expect_refused("The scaled loss", [&] { scaler.scale(view(weight), view(there)); });
  Magnitudes magnitudes;
  expect_refused("The gradient", [&] { magnitudes.add(view(there)); });
  EXPECT_EQ(there, std::vector<float>(64, 1.0f));
}

TEST_F(MemoryPlaces, HostMemoryThatIsCalledDeviceMemoryIsRefused) {
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

TEST_F(MemoryPlaces, MemoryOfAnotherDeviceIsRefused) {
  expect_error(ErrorCode::kInvalidArgument,
               "Gradient 0 is memory of CUDA device 1, but its view says CUDA device 0",
               [&] { measure({on(kCuda0, there)}); });
}

TEST_F(MemoryPlaces, PinnedAndManagedMemoryIsHostMemoryToo) {
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

TEST_F(MemoryPlaces, AStepAsksNothingAboutMemoryThatIsBound) {
  AdamW optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  const int before = fake_driver_queries();
  EXPECT_GE(before, 2) << "so questions are counted";
  for (int i = 0; i < 3; ++i) {
    scaler.scale(1.0f);
    if (i == 1) scaler.unscale_(optimizer);
    scaler.step(optimizer, {.max_norm = 1.0f});
    scaler.update();
  }
  optimizer.rebind({{"w", view(weight), view(grad)}});
  EXPECT_EQ(fake_driver_queries(), before);
}

TEST_F(MemoryPlaces, ATensorWithoutElementsIsNowhere) {
  TensorView empty = view(there.data(), 0);
  EXPECT_EQ(measure({empty}).count, 0);
  empty.device = kCuda0;
  empty.data = weight.data();
  SGD optimizer({{"w", empty, TensorView{}}});
  EXPECT_EQ(optimizer.parameters().size(), 1u);
}

}  // namespace
}  // namespace headroom
