// A tensor as Headroom sees it: address, element type, number of elements, device. A view owns
// nothing, and has no shape because no step of loss scaling needs one.
#ifndef HEADROOM_TENSOR_H_
#define HEADROOM_TENSOR_H_

#include <headroom/export.h>
#include <headroom/float16.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct DLManagedTensor;  // DLPack's exchange struct, from <dlpack/dlpack.h>

namespace headroom {

/// Types of elements.
enum class DType : uint8_t { kF16, kBF16, kF32, kF64 };

/// "f16", "bf16", "f32" or "f64".
HEADROOM_API const char* to_string(DType dtype);

/// Bytes of one element; 0 for a value that is no DType.
constexpr size_t size_of(DType dtype) {
  return dtype <= DType::kBF16 ? 2 : dtype == DType::kF32 ? 4 : dtype == DType::kF64 ? 8 : 0;
}

/// Kinds of devices.
enum class DeviceType : uint8_t { kCPU, kCUDA };

/// Where memory is.
struct Device {
  DeviceType type = DeviceType::kCPU;
  int index = 0;
};

/// `count` contiguous elements at `data`. The memory belongs to the caller and must outlive every
/// use. Any alignment is accepted. `device` is where the memory is: functions throw
/// Error(kInvalidArgument) if CUDA reports another place (pinned and managed memory may be viewed
/// as either). A view of const data is read-only: functions that would write through it throw.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t count = 0;
  Device device = {};
  bool read_only = false;

  /// The size of its memory.
  size_t bytes() const { return static_cast<size_t>(count) * size_of(dtype); }
};

/// A view of memory of any type, on any device. It does not own the memory.
inline TensorView view(void* data, DType dtype, int64_t count, Device device = {}) {
  return {data, dtype, count, device, false};
}
/// Read-only.
inline TensorView view(const void* data, DType dtype, int64_t count, Device device = {}) {
  return {const_cast<void*>(data), dtype, count, device, true};
}
/// Views of typed memory on the host.
inline TensorView view(f16* data, int64_t count) { return view(data, DType::kF16, count); }
inline TensorView view(bf16* data, int64_t count) { return view(data, DType::kBF16, count); }
inline TensorView view(float* data, int64_t count) { return view(data, DType::kF32, count); }
inline TensorView view(double* data, int64_t count) { return view(data, DType::kF64, count); }
inline TensorView view(const f16* data, int64_t count) { return view(data, DType::kF16, count); }
inline TensorView view(const bf16* data, int64_t count) { return view(data, DType::kBF16, count); }
inline TensorView view(const float* data, int64_t count) { return view(data, DType::kF32, count); }
inline TensorView view(const double* data, int64_t count) { return view(data, DType::kF64, count); }

/// A view of memory that CUDA has allocated; the device is found from the pointer. Throws
/// Error(kInvalidArgument) for ordinary host memory. headroom/cuda.h has overloads for pointers to
/// __half, __nv_bfloat16, float and double.
HEADROOM_API TensorView device_view(void* data, DType dtype, int64_t count);

/// A view of a vector, which must not be resized while the view is in use.
template <typename T>
TensorView view(std::vector<T>& values) {
  return view(values.data(), static_cast<int64_t>(values.size()));
}
/// Read-only.
template <typename T>
TensorView view(const std::vector<T>& values) {
  return view(values.data(), static_cast<int64_t>(values.size()));
}

/// One trainable tensor. An empty `grad` (default-constructed) means that this parameter has no
/// gradient: it is neither measured nor updated. An empty `weight` is allowed for your own
/// optimizers that find their weights themselves; SGD, Adam, AdamW and Lion need one.
struct Parameter {
  std::string name;
  TensorView weight;
  TensorView grad;

  /// Optional FP32 arrays that the fused optimizers use, with their current values, instead of
  /// allocating their own: the master of a 16-bit weight, and the moments (momentum buffer, or
  /// exp_avg and exp_avg_sq). If empty, the optimizer allocates masters as copies of the weights
  /// and moments of zero. A weight that is no rounding of its master replaces it, see
  /// FusedOptimizer::apply().
  TensorView master = {};
  TensorView first_moment = {};
  TensorView second_moment = {};

  /// With RankGradients::kSharded: false for a copy of a gradient that another rank counts. It is
  /// checked for inf and nan and updated like the others, but is not part of the norm.
  bool counted = true;
};

/// Copies with conversion between f16, bf16 and f32. Rounds to nearest even, keeps subnormals and
/// NaN, and gives the same bits on every SIMD target. Views on CUDA have to be on the same device;
/// the conversion is then enqueued on the current stream. Throws if counts differ or memory is
/// shared.
HEADROOM_API void convert(const TensorView& from, const TensorView& to);

/// A view of a contiguous DLPack tensor (float16, bfloat16, float32 or float64; CPU or CUDA). Does
/// not take ownership: the DLPack tensor must outlive the view.
HEADROOM_API TensorView from_dlpack(const DLManagedTensor* tensor);

/// A one-dimensional DLPack tensor over the memory of `view`, without a copy. The receiver has to
/// call its deleter, which frees the descriptor but not the data.
HEADROOM_API DLManagedTensor* to_dlpack(const TensorView& view);

}  // namespace headroom

#endif  // HEADROOM_TENSOR_H_
