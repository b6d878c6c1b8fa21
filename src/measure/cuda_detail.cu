// Counts by magnitude on a CUDA device. Made now and then, to look, so plain code does.
#include <algorithm>
#include <map>

#include "core/cuda.cuh"
#include "measure/cuda.h"

namespace headroom::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMin = GradDetail::kMinExponent;
constexpr int kBins = GradDetail::kMaxExponent - kMin + 1;
constexpr int kZeros = kBins;  // counters behind the histogram
constexpr int kSubnormals = kBins + 1;
constexpr int kCounters = kBins + 2;

__device__ bool subnormal(f16 x) { return (x.bits & 0x7C00) == 0; }
__device__ bool subnormal(bf16 x) { return (x.bits & 0x7F80) == 0; }
__device__ bool subnormal(float x) { return (__float_as_uint(x) & 0x7F800000u) == 0; }
__device__ bool subnormal(double x) { return fabs(x) < 0x1p-1022; }

__device__ double widened(f16 x) { return to_float(x); }
__device__ double widened(bf16 x) { return to_float(x); }
__device__ double widened(float x) { return x; }
__device__ double widened(double x) { return x; }

// Adds the counts of one tensor. Every warp counts on its own, so that few of them meet.
template <typename T>
__global__ void detail_kernel(const T* data, int64_t count, unsigned long long* totals) {
  __shared__ unsigned counters[kWarps][kCounters];
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * kCounters; i += kThreads) {
    counters[0][i] = 0;
  }
  __syncthreads();
  unsigned* const mine = counters[threadIdx.x / 32];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    const T x = data[i];
    const double wide = widened(x);
    if (!isfinite(wide)) continue;
    if (wide == 0.0) {
      atomicAdd(&mine[kZeros], 1u);
      continue;
    }
    if (subnormal(x)) atomicAdd(&mine[kSubnormals], 1u);
    const int exponent = static_cast<int>(__double_as_longlong(wide) >> 52 & 0x7FF) - 1023;
    atomicAdd(&mine[min(max(exponent - kMin, 0), kBins - 1)], 1u);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kCounters; i += kThreads) {
    unsigned long long sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += counters[warp][i];
    if (sum > 0) atomicAdd(&totals[i], sum);
  }
}

template <typename T>
void launch(const TensorView& view, unsigned long long* totals) {
  const int64_t most = 8 * device_facts().multiprocessors;
  const int64_t blocks = std::clamp<int64_t>(view.count / (4 * kThreads), 1, most);
  detail_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, current_stream()>>>(
      static_cast<const T*>(view.data), view.count, totals);
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace

void cuda_detail(const std::vector<TensorView>& list, GradDetail* detail) {
  const int device = list[0].device.index;
  const DeviceScope scope(device);
  thread_local std::map<int, CudaArray<unsigned long long>> all;
  CudaArray<unsigned long long>& totals = all[device];
  totals.reserve(device, kCounters);
  HEADROOM_CUDA(
      cudaMemsetAsync(totals.data(), 0, kCounters * sizeof(unsigned long long), current_stream()));
  for (const TensorView& view : list) {
    if (view.count == 0) continue;
    if (view.dtype == DType::kF16) launch<f16>(view, totals.data());
    if (view.dtype == DType::kBF16) launch<bf16>(view, totals.data());
    if (view.dtype == DType::kF32) launch<float>(view, totals.data());
    if (view.dtype == DType::kF64) launch<double>(view, totals.data());
  }
  std::vector<unsigned long long> found(kCounters);
  cuda_copy(device, found.data(), totals.data(), found.size() * sizeof(found[0]));
  detail->zeros += static_cast<int64_t>(found[kZeros]);
  detail->subnormals += static_cast<int64_t>(found[kSubnormals]);
  for (size_t i = 0; i < kBins; ++i) detail->histogram[i] += static_cast<int64_t>(found[i]);
}

}  // namespace headroom::internal
