// Devices, memory and copies for the other modules' CUDA code.
#include "core/cuda.cuh"

#include <headroom/runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>

#include "core/cuda.h"
#include "core/element.h"

namespace headroom {

bool cuda_available() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

namespace internal {

void cuda_failed(cudaError_t error, const char* call) {
  cudaGetLastError();  // clears the error, unless it is a sticky one
  const bool memory = error == cudaErrorMemoryAllocation;
  throw Error(memory ? ErrorCode::kOutOfMemory : ErrorCode::kUnsupported,
              std::string("CUDA error '") + cudaGetErrorString(error) + "' in " + call + ".");
}

bool built_with_cuda() { return true; }

cudaStream_t current_stream() {
  int device = 0;
  HEADROOM_CUDA(cudaGetDevice(&device));
  return static_cast<cudaStream_t>(stream_on(device));
}

namespace {

__global__ void probe_kernel() {}

}  // namespace

int cuda_code_version(int device) {
  // For all threads: one that captures a CUDA graph finds the version that another asked for
  // before.
  static std::array<std::atomic<int>, 64> known{};
  auto& version = known.at(static_cast<size_t>(device));
  if (version == 0) {
    const DeviceScope scope(device);
    cudaFuncAttributes attributes{};
    HEADROOM_CUDA(cudaFuncGetAttributes(&attributes, probe_kernel));
    version = attributes.ptxVersion;
  }
  return version;
}

const DeviceFacts& device_facts() {
  int device = 0;
  HEADROOM_CUDA(cudaGetDevice(&device));
  thread_local std::map<int, DeviceFacts> all;
  DeviceFacts& facts = all[device];
  if (facts.multiprocessors == 0) {
    facts.overlaps = cuda_code_version(device) >= 90;
    HEADROOM_CUDA(
        cudaDeviceGetAttribute(&facts.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  }
  return facts;
}

namespace {

bool capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  HEADROOM_CUDA(cudaStreamIsCapturing(current_stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

// Memory cannot be allocated while a stream is captured; the attempt would invalidate the capture.
void check_not_capturing() {
  if (!capturing()) return;
  throw Error(ErrorCode::kWrongOrder,
              "Memory is needed while a CUDA graph is captured; run the same step once before the "
              "capture, so that it is allocated.");
}

}  // namespace

CudaBuffer::CudaBuffer(int device, size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  check_not_capturing();
  void* data = nullptr;
  bytes = (bytes + 15) / 16 * 16;  // cuda_upload() writes words of 8 bytes
  HEADROOM_CUDA(cudaMalloc(&data, bytes));
  data_.reset(data);
  // On the current stream: non-blocking streams are not ordered with the default one.
  HEADROOM_CUDA(cudaMemsetAsync(data, 0, bytes, current_stream()));
  cuda_wait(device);
}

void CudaFree::operator()(void* data) const {
  cudaFree(data);  // waits for kernels that use the memory; a destructor cannot report errors
}

CudaHostBuffer::CudaHostBuffer(size_t bytes) {
  check_not_capturing();
  void* data = nullptr;
  HEADROOM_CUDA(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  data_.reset(data);
  std::memset(data, 0, bytes);
}

void CudaFreeHost::operator()(void* data) const { cudaFreeHost(data); }

namespace {

// The bytes of an upload, as a kernel argument.
template <size_t kCount>
struct Words {
  uint64_t at[kCount];
};

template <size_t kCount>
__global__ void upload_kernel(const __grid_constant__ Words<kCount> words, uint64_t* to,
                              int count) {
  for (auto i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    to[i] = words.at[i];
  }
}

template <size_t kCount>
void upload_part(char* to, const char* from, size_t bytes) {
  Words<kCount> words;
  std::memcpy(&words, from, bytes);
  upload_kernel<kCount><<<1, 256, 0, current_stream()>>>(words, reinterpret_cast<uint64_t*>(to),
                                                         static_cast<int>((bytes + 7) / 8));
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace

void cuda_upload(void* to, const void* from, size_t bytes) {
  // Words per launch. Kernel arguments are limited to 32764 bytes from CUDA 12.1 on, and to 4 KiB
  // before. Small uploads use a kernel with few arguments, which launches faster.
  constexpr size_t kFew = 64;
  constexpr size_t kMany = CUDART_VERSION >= 12010 ? 4000 : 480;
  for (size_t done = 0; done < bytes; done += 8 * kMany) {
    const size_t part = std::min(8 * kMany, bytes - done);
    auto* const upload = part <= 8 * kFew ? upload_part<kFew> : upload_part<kMany>;
    upload(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, part);
  }
}

void cuda_wait(int device) {
  const DeviceScope scope(device);
  HEADROOM_CUDA(cudaStreamSynchronize(current_stream()));
}

void cuda_settle(int device) {
  const DeviceScope scope(device);
  if (!capturing()) cuda_wait(device);
}

void cuda_refuse_capture(int device) {
  const DeviceScope scope(device);
  check_not_capturing();
}

void cuda_copy(int device, void* to, const void* from, size_t bytes) {
  const DeviceScope scope(device);
  HEADROOM_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, current_stream()));
  HEADROOM_CUDA(cudaStreamSynchronize(current_stream()));
}

void cuda_zero(int device, void* data, size_t bytes) {
  const DeviceScope scope(device);
  HEADROOM_CUDA(cudaMemsetAsync(data, 0, bytes, current_stream()));
}

namespace {

template <typename From, typename To>
__global__ void convert_kernel(const From* from, To* to, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    to[i] = from_float<To>(to_float(from[i]));
  }
}

}  // namespace

void cuda_convert(const TensorView& from, const TensorView& to) {
  if (from.count == 0) return;
  const DeviceScope scope(to.device.index);
  if (from.dtype == to.dtype) {
    HEADROOM_CUDA(
        cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDefault, current_stream()));
    return;
  }
  const int blocks = 8 * device_facts().multiprocessors;
  with_type<f16, bf16, float>(from.dtype, [&](auto source) {
    with_type<f16, bf16, float>(to.dtype, [&](auto target) {
      convert_kernel<<<blocks, 256, 0, current_stream()>>>(
          static_cast<const decltype(source)*>(from.data), static_cast<decltype(target)*>(to.data),
          from.count);
    });
  });
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace internal
}  // namespace headroom
