// Views of DLPack tensors, and DLPack tensors over views. Nothing is copied.
#include <dlpack/dlpack.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/check.h"

namespace headroom {
namespace {

using internal::require;

DType dtype_of(DLDataType type) {
  require(type.lanes == 1, ErrorCode::kUnsupported,
          "The DLPack tensor has vector elements; pass one with lanes = 1.");
  if (type.code == kDLBfloat && type.bits == 16) return DType::kBF16;
  if (type.code == kDLFloat && type.bits == 16) return DType::kF16;
  if (type.code == kDLFloat && type.bits == 32) return DType::kF32;
  if (type.code == kDLFloat && type.bits == 64) return DType::kF64;
  throw Error(ErrorCode::kUnsupported,
              "The DLPack tensor has type code " + std::to_string(type.code) + " with " +
                  std::to_string(type.bits) +
                  " bits; Headroom takes float16, bfloat16, float32 and float64.");
}

DLDataType dlpack_type(DType dtype) {
  const uint8_t code = dtype == DType::kBF16 ? kDLBfloat : kDLFloat;
  return {code, static_cast<uint8_t>(8 * size_of(dtype)), 1};
}

// Number of elements. Throws unless the tensor is row-major without gaps. The stride of a dimension
// of size 1 is never used, so any value is accepted there.
int64_t contiguous_count(const DLTensor& tensor) {
  int64_t count = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const int64_t size = tensor.shape[i];
    require(size >= 0, ErrorCode::kInvalidArgument,
            "The DLPack tensor has a negative dimension; its shape is damaged.");
    const bool in_order = tensor.strides == nullptr || size <= 1 || tensor.strides[i] == count;
    require(in_order || count == 0, ErrorCode::kUnsupported,
            "The DLPack tensor is not contiguous; make it contiguous first.");
    require(size == 0 || count <= internal::kMaxCount / size, ErrorCode::kInvalidArgument,
            "The DLPack tensor claims more elements than any memory holds; its shape is damaged.");
    count *= size;
  }
  return count;
}

// What a DLPack tensor made by to_dlpack() owns: the descriptor, not the data.
struct Export {
  DLManagedTensor managed;
  int64_t shape[1];
};

}  // namespace

TensorView from_dlpack(const DLManagedTensor* managed) {
  require(managed != nullptr, ErrorCode::kInvalidArgument,
          "from_dlpack got a null tensor; pass the DLManagedTensor.");
  const DLTensor& tensor = managed->dl_tensor;
  require(tensor.ndim >= 0 && (tensor.ndim == 0 || tensor.shape != nullptr),
          ErrorCode::kInvalidArgument,
          "The DLPack tensor has no shape; it is damaged or already deleted.");
  TensorView view;
  view.dtype = dtype_of(tensor.dtype);
  view.count = contiguous_count(tensor);
  switch (tensor.device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      break;
    case kDLCUDA:
    case kDLCUDAManaged:
      view.device = {DeviceType::kCUDA, tensor.device.device_id};
      break;
    default:
      throw Error(ErrorCode::kUnsupported, "The DLPack tensor is on device type " +
                                               std::to_string(tensor.device.device_type) +
                                               "; Headroom takes CPU (1) and CUDA (2) memory.");
  }
  require(tensor.data != nullptr || view.count == 0, ErrorCode::kInvalidArgument,
          "The DLPack tensor has elements but null data; it is damaged.");
  if (view.count != 0) view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return view;
}

DLManagedTensor* to_dlpack(const TensorView& view) {
  require(!view.read_only, ErrorCode::kUnsupported,
          "This view is of const data, and DLPack 0.6 has no read-only tensors; copy it first.");
  TensorView on_cpu = view;
  on_cpu.device = {};  // a build without CUDA can still export memory of a device
  internal::check_form(on_cpu, internal::Access::kRead, "The view");
  internal::check_memory(view, "The view");
  auto owner = std::make_unique<Export>();
  owner->shape[0] = view.count;
  DLTensor& tensor = owner->managed.dl_tensor;
  tensor.data = view.data;
  tensor.device = {view.device.type == DeviceType::kCUDA ? kDLCUDA : kDLCPU, view.device.index};
  tensor.ndim = 1;
  tensor.dtype = dlpack_type(view.dtype);
  tensor.shape = owner->shape;
  tensor.strides = nullptr;
  tensor.byte_offset = 0;
  owner->managed.manager_ctx = owner.get();
  owner->managed.deleter = [](DLManagedTensor* self) {
    delete static_cast<Export*>(self->manager_ctx);
  };
  return &owner.release()->managed;
}

}  // namespace headroom
