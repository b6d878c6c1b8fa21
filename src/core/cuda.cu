#include "core/cuda.cuh"

#include <headroom/runtime.h>

#include <map>

#include "core/cuda.h"

namespace headroom {
namespace {

thread_local void* g_stream = nullptr;

}  // namespace

StreamScope::StreamScope(void* cuda_stream) : before_(g_stream) { g_stream = cuda_stream; }
StreamScope::~StreamScope() { g_stream = before_; }

bool cuda_available() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

namespace internal {

void cuda_failed(cudaError_t error, const char* call) {
  cudaGetLastError();  // forgets it, unless it is one that stays
  const bool memory = error == cudaErrorMemoryAllocation;
  throw Error(memory ? ErrorCode::kOutOfMemory : ErrorCode::kUnsupported,
              std::string("CUDA says '") + cudaGetErrorString(error) + "' to " + call + ".");
}

bool built_with_cuda() { return true; }

cudaStream_t current_stream() { return static_cast<cudaStream_t>(g_stream); }

int multiprocessors() {
  int device = 0;
  HEADROOM_CUDA(cudaGetDevice(&device));
  thread_local std::map<int, int> counts;
  int& count = counts[device];
  if (count == 0) {
    HEADROOM_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  }
  return count;
}

CudaBuffer::CudaBuffer(int device, size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  void* data = nullptr;
  HEADROOM_CUDA(cudaMalloc(&data, bytes));
  data_.reset(data);
  HEADROOM_CUDA(cudaMemset(data, 0, bytes));
}

void CudaFree::operator()(void* data) const {
  cudaFree(data);  // waits for kernels that use it; an error here has nobody to tell
}

void cuda_copy(void* to, const void* from, size_t bytes) {
  HEADROOM_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, current_stream()));
  HEADROOM_CUDA(cudaStreamSynchronize(current_stream()));
}

void cuda_zero(const TensorView& view) {
  const DeviceScope scope(view.device.index);
  HEADROOM_CUDA(cudaMemsetAsync(view.data, 0, view.bytes(), current_stream()));
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

template <typename From, typename To>
void launch_convert(const TensorView& from, const TensorView& to) {
  const int blocks = 8 * multiprocessors();
  convert_kernel<<<blocks, 256, 0, current_stream()>>>(static_cast<const From*>(from.data),
                                                       static_cast<To*>(to.data), from.count);
  HEADROOM_CUDA(cudaGetLastError());
}

template <typename From>
void launch_convert_from(const TensorView& from, const TensorView& to) {
  if (to.dtype == DType::kF16) launch_convert<From, f16>(from, to);
  if (to.dtype == DType::kBF16) launch_convert<From, bf16>(from, to);
  if (to.dtype == DType::kF32) launch_convert<From, float>(from, to);
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
  if (from.dtype == DType::kF16) launch_convert_from<f16>(from, to);
  if (from.dtype == DType::kBF16) launch_convert_from<bf16>(from, to);
  if (from.dtype == DType::kF32) launch_convert_from<float>(from, to);
}

}  // namespace internal
}  // namespace headroom
