// Helpers of the GPU tests: tensors on the host and copies of them on the device.
#ifndef HEADROOM_TESTS_CUDA_SUPPORT_H_
#define HEADROOM_TESTS_CUDA_SUPPORT_H_

#include <cuda_runtime.h>

#include <cstring>
#include <memory>

#include "tests/support.h"

namespace headroom {

// A copy of a host tensor on device 0, `offset` elements into its allocation, which tests unaligned
// addresses.
class DeviceCopy {
 public:
  explicit DeviceCopy(const TensorView& host, size_t offset = 0) : host_(host), offset_(offset) {
    EXPECT_EQ(cudaMalloc(&block_, host.bytes() + 64), cudaSuccess);
    if (host.count > 0) {
      EXPECT_EQ(cudaMemcpy(data(), host.data, host.bytes(), cudaMemcpyDefault), cudaSuccess);
    }
  }
  ~DeviceCopy() { cudaFree(block_); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  TensorView view() const {
    return {data(), host_.dtype, host_.count, {DeviceType::kCUDA, 0}, false};
  }

  void write(const TensorView& host) const {
    EXPECT_EQ(cudaMemcpy(data(), host.data, host.bytes(), cudaMemcpyDefault), cudaSuccess);
  }

  std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> copy(host_.bytes());
    EXPECT_EQ(cudaMemcpy(copy.data(), data(), copy.size(), cudaMemcpyDefault), cudaSuccess);
    return copy;
  }

 private:
  void* data() const { return static_cast<char*>(block_) + offset_ * size_of(host_.dtype); }
  TensorView host_;
  size_t offset_;
  void* block_ = nullptr;
};

inline std::vector<unsigned char> bytes_at(const TensorView& view) {
  const auto* data = static_cast<const unsigned char*>(view.data);
  return {data, data + view.bytes()};
}

// A host tensor of any dtype, filled with normally distributed values.
class HostTensor {
 public:
  HostTensor(DType dtype, int64_t count, unsigned seed, double size = 1.0)
      : memory_(static_cast<size_t>(count) * size_of(dtype) + 8),
        view_(headroom::view(static_cast<void*>(memory_.data()), dtype, count)) {
    refill(seed, size);
  }
  HostTensor(const HostTensor&) = delete;
  HostTensor& operator=(const HostTensor&) = delete;

  void refill(unsigned seed, double size) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0.0, size);
    for (int64_t i = 0; i < view_.count; ++i) set(i, normal(random));
  }
  // Powers of two times `size`: their squares are summed without rounding, so the norm has the same
  // bits in any order of summation.
  void refill_exactly(unsigned seed, double size) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < view_.count; ++i) {
      const auto bits = random();
      set(i, std::ldexp(bits & 8 ? size : -size, -static_cast<int>(bits % 4)));
    }
  }
  void set(int64_t i, double value) {
    void* to = memory_.data() + static_cast<size_t>(i) * size_of(view_.dtype);
    const auto store = [&](auto x) { std::memcpy(to, &x, sizeof(x)); };
    if (view_.dtype == DType::kF16) store(f16(static_cast<float>(value)));
    if (view_.dtype == DType::kBF16) store(bf16(static_cast<float>(value)));
    if (view_.dtype == DType::kF32) store(static_cast<float>(value));
    if (view_.dtype == DType::kF64) store(value);
  }
  const TensorView& view() const { return view_; }

 private:
  std::vector<unsigned char> memory_;
  TensorView view_;
};

// Skips its tests where there is no CUDA device. tests/CMakeLists.txt labels them `gpu`.
class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  }
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_CUDA_SUPPORT_H_
