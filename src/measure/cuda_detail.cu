// Counts elements by magnitude on a CUDA device. Used for occasional inspection, so it is not
// optimised beyond private counters per warp.
#include <algorithm>
#include <map>

#include "core/cuda.cuh"
#include "core/element.h"
#include "measure/cuda.h"

namespace headroom::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMin = GradDetail::kMinExponent;
constexpr int kBins = GradDetail::kBins;
constexpr int kZeros = kBins;  // two more counters follow the histogram
constexpr int kSubnormals = kBins + 1;
constexpr int kCounters = kBins + 2;

// Adds the counts of one tensor. Every warp has its own counters in shared memory, which keeps
// contention of the atomic additions low.
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
    const auto magnitude = magnitude_of(x);
    if (magnitude >= Element<T>::kInf) continue;
    if (magnitude == 0) {
      atomicAdd(&mine[kZeros], 1u);
      continue;
    }
    if (magnitude < Element<T>::kMinNormal) atomicAdd(&mine[kSubnormals], 1u);
    const int exponent = static_cast<int>(__double_as_longlong(widen(x)) >> 52 & 0x7FF) - 1023;
    atomicAdd(&mine[min(max(exponent - kMin, 0), kBins - 1)], 1u);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kCounters; i += kThreads) {
    unsigned long long sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += counters[warp][i];
    if (sum > 0) atomicAdd(&totals[i], sum);
  }
}

}  // namespace

void cuda_detail(const std::vector<TensorView>& list, GradDetail* detail) {
  const int device = list[0].device.index;
  const DeviceScope scope(device);
  thread_local std::map<int, CudaArray<unsigned long long>> all;  // reused by the next call
  CudaArray<unsigned long long>& totals = all[device];
  totals.reserve(device, kCounters);
  HEADROOM_CUDA(
      cudaMemsetAsync(totals.data(), 0, kCounters * sizeof(unsigned long long), current_stream()));
  for (const TensorView& view : list) {
    if (view.count == 0) continue;
    const int64_t most = 8 * device_facts().multiprocessors;
    const auto blocks =
        static_cast<unsigned>(std::clamp<int64_t>(view.count / (4 * kThreads), 1, most));
    with_type<f16, bf16, float, double>(view.dtype, [&](auto element) {
      detail_kernel<<<blocks, kThreads, 0, current_stream()>>>(
          static_cast<const decltype(element)*>(view.data), view.count, totals.data());
    });
    HEADROOM_CUDA(cudaGetLastError());
  }
  std::vector<unsigned long long> found(kCounters);
  cuda_copy(device, found.data(), totals.data(), found.size() * sizeof(found[0]));
  detail->zeros += static_cast<int64_t>(found[kZeros]);
  detail->subnormals += static_cast<int64_t>(found[kSubnormals]);
  for (size_t i = 0; i < kBins; ++i) detail->histogram[i] += static_cast<int64_t>(found[i]);
}

}  // namespace headroom::internal
