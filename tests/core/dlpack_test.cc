// Views to and from DLPack.
#include <dlpack/dlpack.h>

#include "tests/support.h"

namespace headroom {
namespace {

DLManagedTensor make_dlpack(void* data, std::vector<int64_t>& shape, DLDataType type) {
  DLManagedTensor managed{};
  managed.dl_tensor.data = data;
  managed.dl_tensor.device = {kDLCPU, 0};
  managed.dl_tensor.ndim = static_cast<int>(shape.size());
  managed.dl_tensor.dtype = type;
  managed.dl_tensor.shape = shape.data();
  return managed;
}

constexpr DLDataType kHalf = {kDLFloat, 16, 1};

TEST(DLPack, RoundTripPreservesTheView) {
  std::vector<bf16> values(5);
  const TensorView before = view(values);
  DLManagedTensor* managed = to_dlpack(before);
  const TensorView after = from_dlpack(managed);
  EXPECT_EQ(after.data, before.data);
  EXPECT_EQ(after.dtype, DType::kBF16);
  EXPECT_EQ(after.count, 5);
  managed->deleter(managed);
}

TEST(DLPack, AcceptsOnlyContiguousTensors) {
  std::vector<f16> values(24);
  std::vector<int64_t> shape = {2, 3, 4};
  DLManagedTensor managed = make_dlpack(values.data(), shape, kHalf);
  EXPECT_EQ(from_dlpack(&managed).count, 24);
  std::vector<int64_t> strides = {12, 4, 1};
  managed.dl_tensor.strides = strides.data();
  EXPECT_EQ(from_dlpack(&managed).count, 24);
  strides = {1, 2, 6};
  expect_error(ErrorCode::kUnsupported, "contiguous", [&] { from_dlpack(&managed); });
}

TEST(DLPack, HonoursByteOffsetAndDevice) {
  std::vector<float> values(8);
  std::vector<int64_t> shape = {4};
  DLManagedTensor managed = make_dlpack(values.data(), shape, {kDLFloat, 32, 1});
  managed.dl_tensor.byte_offset = 16;
  EXPECT_EQ(from_dlpack(&managed).data, values.data() + 4);
  managed.dl_tensor.device = {kDLCUDA, 99};
  EXPECT_EQ(from_dlpack(&managed).device.type, DeviceType::kCUDA);
  EXPECT_EQ(from_dlpack(&managed).device.index, 99);
  expect_error(ErrorCode::kUnsupported, "CUDA", [&] { measure({from_dlpack(&managed)}); });
}

TEST(DLPack, RejectsInvalidTensors) {
  std::vector<f16> values(4);
  std::vector<int64_t> shape = {4};
  DLManagedTensor managed = make_dlpack(values.data(), shape, {kDLInt, 32, 1});
  expect_error(ErrorCode::kUnsupported, "float16", [&] { from_dlpack(&managed); });
  managed.dl_tensor.dtype = {kDLFloat, 16, 2};
  expect_error(ErrorCode::kUnsupported, "lanes", [&] { from_dlpack(&managed); });
  managed.dl_tensor.dtype = kHalf;
  managed.dl_tensor.device = {kDLMetal, 0};
  expect_error(ErrorCode::kUnsupported, "device type", [&] { from_dlpack(&managed); });
  managed.dl_tensor.device = {kDLCPU, 0};
  shape[0] = -1;
  expect_error(ErrorCode::kInvalidArgument, "negative", [&] { from_dlpack(&managed); });
  shape[0] = int64_t{1} << 62;
  expect_error(ErrorCode::kInvalidArgument, "more elements", [&] { from_dlpack(&managed); });
  shape[0] = 4;
  managed.dl_tensor.data = nullptr;
  expect_error(ErrorCode::kInvalidArgument, "null data", [&] { from_dlpack(&managed); });
  managed.dl_tensor.shape = nullptr;
  expect_error(ErrorCode::kInvalidArgument, "no shape", [&] { from_dlpack(&managed); });
  expect_error(ErrorCode::kInvalidArgument, "null tensor", [&] { from_dlpack(nullptr); });
  expect_error(ErrorCode::kInvalidArgument, "null data", [] {
    to_dlpack({nullptr, DType::kF32, 10});
  });
  const std::vector<f16> constant(4);
  expect_error(ErrorCode::kUnsupported, "const", [&] { to_dlpack(view(constant)); });
}

}  // namespace
}  // namespace headroom
