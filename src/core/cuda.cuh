// For .cu files: checked calls, the caller's stream, vectors of 16-bit and 32-bit elements.
#ifndef HEADROOM_SRC_CORE_CUDA_CUH_
#define HEADROOM_SRC_CORE_CUDA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <headroom/error.h>
#include <headroom/float16.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace headroom::internal {

[[noreturn]] void cuda_failed(cudaError_t error, const char* call);

#define HEADROOM_CUDA(call)                                                        \
  do {                                                                             \
    const cudaError_t headroom_error = (call);                                     \
    if (headroom_error != cudaSuccess) ::headroom::internal::cuda_failed(headroom_error, #call); \
  } while (false)

/// The stream of the innermost StreamScope of this thread.
cudaStream_t current_stream();

/// Makes a device the current one of this thread, and goes back at the end.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    HEADROOM_CUDA(cudaGetDevice(&before_));
    if (device != before_) HEADROOM_CUDA(cudaSetDevice(device));
    changed_ = device != before_;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// Streaming multiprocessors of the current device.
int multiprocessors();

// Conversions by the hardware's instructions. They round as the reference in float16.h does.
__device__ inline float to_float(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float to_float(bf16 x) { return bfloat_bits_to_float(x.bits); }
__device__ inline float to_float(float x) { return x; }
template <typename T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, f16>) {
    return f16::from_bits(__half_as_ushort(__float2half_rn(x)));
  } else if constexpr (std::is_same_v<T, bf16>) {
    return bf16(x);
  } else {
    return x;
  }
}

/// Eight elements, loaded and stored 16 bytes at a time.
template <typename T>
struct alignas(16) Eight {
  T at[8];
};

__device__ inline uint4 load_16(const void* from, bool streaming) {
  const auto* p = static_cast<const uint4*>(from);
  return streaming ? __ldcs(p) : *p;
}

/// `streaming`: not wanted again soon.
template <typename T>
__device__ inline Eight<T> load_eight(const T* from, bool streaming) {
  Eight<T> values;
  auto* parts = reinterpret_cast<uint4*>(&values);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
    parts[i] = load_16(reinterpret_cast<const uint4*>(from) + i, streaming);
  }
  return values;
}

template <typename T>
__device__ inline void store_eight(T* to, const Eight<T>& values) {
  const auto* parts = reinterpret_cast<const uint4*>(&values);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
    __stcs(reinterpret_cast<uint4*>(to) + i, parts[i]);
  }
}

__host__ __device__ inline bool aligned_16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CUDA_CUH_
