// A view whose memory is on another device than it claims is rejected; every kind of memory that
// the device can access is accepted. This file uses the real driver; fake_driver_test.cc covers
// every call.
#include "tests/cuda/support.h"

namespace headroom {
namespace {

constexpr Device kCuda0{DeviceType::kCUDA, 0};
constexpr int64_t kCount = 1000;

TensorView floats(void* data, const Device& device) {
  return view(data, DType::kF32, kCount, device);
}

TEST_F(Cuda, DeviceMemoryInCpuViewsIsRejected) {
  const HostTensor host(DType::kF32, kCount, 1), other(DType::kF32, kCount, 2);
  const DeviceCopy device(host.view());
  TensorView claimed = device.view();
  claimed.device = {};
  const std::string part = " is memory of CUDA device 0, but its view says CPU";
  expect_error(ErrorCode::kInvalidArgument, "The weight of Parameter 'w'" + part, [&] {
    AdamW optimizer({{"w", claimed, other.view()}});
  });
  expect_error(ErrorCode::kInvalidArgument, "Gradient 0" + part, [&] { measure({claimed}); });
  expect_error(ErrorCode::kInvalidArgument, "Gradient 0" + part,
               [&] { unscale_({claimed}, 0.5f); });
  claimed.data = static_cast<char*>(claimed.data) + 400;  // inside its allocation
  claimed.count = 10;
  expect_error(ErrorCode::kInvalidArgument, "Gradient 0" + part, [&] { measure({claimed}); });
}

TEST_F(Cuda, HostMemoryInCudaViewsIsRejectedAndTheContextStaysUsable) {
  int pageable = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0), cudaSuccess);
  HostTensor host(DType::kF32, kCount, 1), other(DType::kF32, kCount, 2);
  TensorView claimed = host.view(), grad = other.view();
  claimed.device = grad.device = kCuda0;
  if (pageable != 0) {  // the device can access pageable host memory
    EXPECT_EQ(measure({claimed}).count, kCount);
    return;
  }
  const std::string part = " is host memory that CUDA device 0 cannot reach";
  expect_error(ErrorCode::kInvalidArgument, "The weight of Parameter 'w'" + part, [&] {
    AdamW optimizer({{"w", claimed, grad}});
  });
  expect_error(ErrorCode::kInvalidArgument, "Gradient 0" + part, [&] { measure({claimed}); });
  const DeviceCopy device(host.view());
  EXPECT_EQ(measure({device.view()}).count, kCount);
}

TEST_F(Cuda, WrongDeviceIndexIsRejected) {
  const HostTensor host(DType::kF32, kCount, 1);
  const DeviceCopy device(host.view());
  TensorView claimed = device.view();
  claimed.device.index = 1;
  expect_error(ErrorCode::kInvalidArgument,
               "Gradient 0 is memory of CUDA device 0, but its view says CUDA device 1",
               [&] { measure({claimed}); });
}

void expect_usable(void* data, const Device& device) {
  const HostTensor host(DType::kF32, kCount, 3);
  ASSERT_EQ(cudaMemcpy(data, host.view().data, host.view().bytes(), cudaMemcpyDefault),
            cudaSuccess);
  EXPECT_EQ(measure({floats(data, device)}).amax, measure({host.view()}).amax);
  const DeviceCopy device_grad(host.view());
  const TensorView grad = device.type == DeviceType::kCUDA ? device_grad.view() : host.view();
  SGD optimizer({{"w", floats(data, device), grad}});
  optimizer.apply(1.0f, false);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(Cuda, PinnedAndManagedMemoryIsUsableOnHostAndDevice) {
  void *pinned = nullptr, *managed = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, kCount * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMallocManaged(&managed, kCount * sizeof(float)), cudaSuccess);
  for (void* const data : {pinned, managed}) {
    expect_usable(data, kCuda0);
    expect_usable(data, {});
  }
  std::vector<float> registered(kCount);
  ASSERT_EQ(cudaHostRegister(registered.data(), kCount * sizeof(float), cudaHostRegisterDefault),
            cudaSuccess);
  expect_usable(registered.data(), {});
  expect_usable(registered.data(), kCuda0);
  cudaHostUnregister(registered.data());
  cudaFreeHost(pinned);
  cudaFree(managed);
}

TEST_F(Cuda, CudaMallocAsyncMemoryIsDeviceMemory) {
  int pools = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, 0), cudaSuccess);
  if (pools == 0) GTEST_SKIP() << "this device has no memory pools";
  void* data = nullptr;
  ASSERT_EQ(cudaMallocAsync(&data, kCount * sizeof(float), nullptr), cudaSuccess);
  expect_usable(data, kCuda0);
  expect_error(ErrorCode::kInvalidArgument, "its view says CPU",
               [&] { measure({floats(data, {})}); });
  cudaFreeAsync(data, nullptr);
}

}  // namespace
}  // namespace headroom
