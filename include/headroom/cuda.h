// For CUDA programs: views of CUDA's 16-bit types; the device is found from the pointer. Not part
// of headroom.h, because it includes CUDA's headers.
#ifndef HEADROOM_CUDA_H_
#define HEADROOM_CUDA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <headroom/tensor.h>

#include <cstdint>

namespace headroom {

/// See device_view() in headroom/tensor.h.
inline TensorView device_view(__half* data, int64_t count) {
  return device_view(data, DType::kF16, count);
}
/// BF16 on the device that the pointer belongs to.
inline TensorView device_view(__nv_bfloat16* data, int64_t count) {
  return device_view(data, DType::kBF16, count);
}
/// FP32 on the device that the pointer belongs to.
inline TensorView device_view(float* data, int64_t count) {
  return device_view(data, DType::kF32, count);
}
/// FP64 on the device that the pointer belongs to.
inline TensorView device_view(double* data, int64_t count) {
  return device_view(data, DType::kF64, count);
}

}  // namespace headroom

#endif  // HEADROOM_CUDA_H_
