// Counts the elements of tensors by their fate in FP16: one kernel per tensor, or for many of the
// same type, which adds integers to rows of the table. Sums and maxima of integers do not depend on
// the order of atomic operations, so that the result is reproducible.
#include <algorithm>
#include <array>

#include "core/cuda.cuh"
#include "core/element.h"
#include "measure/cuda.h"
#include "measure/ranges.h"

namespace headroom::internal {

/// One row on the device.
struct CudaRangeRow {
  unsigned long long reached[4];  // as in Reached
  unsigned long long positive_inf, negative_inf, nan;
  unsigned long long amax;  // bits of the double, ordered like the numbers
};

namespace {

constexpr int kThreads = 256;
constexpr int kResident = 4;               // blocks per multiprocessor
constexpr int64_t kBlockBytes = 32 << 10;  // that are worth another block
constexpr int kTurns = 4;                  // outstanding loads per thread

// Counts of one thread. Elements of 32 and 64 bits are counted one at a time.
template <typename T>
struct Counts {
  using Bits = typename Element<T>::Bits;
  using Limits = Fp16Limits<T>;
  uint32_t reached[4] = {0, 0, 0, 0};
  Bits largest = 0;  // finite magnitude

  // Returns whether all elements are finite. If not, the caller updates `largest`.
  template <int kCount>
  __device__ bool add(const Pack<T, kCount>& pack) {
    Bits most = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const Bits magnitude = magnitude_of(pack.at[e]);
      most = max(most, magnitude);
      reached[0] += magnitude != 0;
      reached[1] += magnitude >= Limits::kKept;
      reached[2] += magnitude >= Limits::kNormal;
      reached[3] += magnitude >= Limits::kOverflow;
    }
    if (most >= Element<T>::kInf) return false;
    largest = max(largest, most);
    return true;
  }
  __device__ void flush() {}
  __device__ Bits finite_largest() const { return largest; }
  __device__ void note(Bits magnitude) { largest = max(largest, magnitude); }
};

// 16-bit elements are counted in pairs: adding 0x8000 - limit to a magnitude sets bit 15 if and
// only if it reaches the limit, and never carries into the other half of the word.
template <typename T>
requires(sizeof(T) == 2) struct Counts<T> {
  using Limits = Fp16Limits<T>;
  uint32_t reached[4] = {0, 0, 0, 0};
  uint32_t pairs[4] = {0, 0, 0, 0};  // two 16-bit counters each
  uint32_t largest = 0;              // of both halves
  int packs = 0;

  static __device__ uint32_t reaching(uint32_t magnitudes, uint16_t limit) {
    return (magnitudes + (0x8000u - limit) * 0x00010001u) >> 15 & 0x00010001u;
  }
  template <int kCount>
  __device__ bool add(const Pack<T, kCount>& pack) {
    constexpr bool kIsF16 = std::is_same_v<T, f16>;
    uint32_t most = 0;
#pragma unroll
    for (int p = 0; p < kCount / 2; ++p) {
      const uint32_t word = pack.at[2 * p].bits | static_cast<uint32_t>(pack.at[2 * p + 1].bits)
                                                      << 16;
      const uint32_t magnitudes = word & 0x7FFF7FFFu;
      most = __vmaxu2(most, magnitudes);
      pairs[0] += reaching(magnitudes, 1);
      if constexpr (!kIsF16) pairs[1] += reaching(magnitudes, Limits::kKept);
      pairs[2] += reaching(magnitudes, Limits::kNormal);
      if constexpr (!kIsF16) pairs[3] += reaching(magnitudes, Limits::kOverflow);
    }
    if (++packs == 8192) flush();  // 4 per pack and half: the next 8192 still fit
    if (reaching(most, Element<T>::kInf) != 0) return false;
    largest = __vmaxu2(largest, most);
    return true;
  }
  __device__ void flush() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reached[i] += (pairs[i] & 0xFFFFu) + (pairs[i] >> 16);
      pairs[i] = 0;
    }
    packs = 0;
  }
  __device__ uint16_t finite_largest() const {
    return static_cast<uint16_t>(max(largest & 0xFFFFu, largest >> 16));
  }
  __device__ void note(uint16_t magnitude) { largest = __vmaxu2(largest, magnitude); }
};

// inf and NaN of one thread.
struct Special {
  uint32_t positive_inf = 0, negative_inf = 0, nan = 0;
};

template <typename T, int kCount>
__device__ void count_pack(const Pack<T, kCount>& pack, Counts<T>* counts, Special* special) {
  if (counts->add(pack)) return;
  for (const T& x : pack.at) {
    const auto magnitude = magnitude_of(x);
    if (magnitude < Element<T>::kInf) {
      counts->note(magnitude);
    } else if (magnitude > Element<T>::kInf) {
      ++special->nan;
    } else if (std::bit_cast<typename Element<T>::Bits>(x) == magnitude) {
      ++special->positive_inf;
    } else {
      ++special->negative_inf;
    }
  }
}

// Every one of `blocks` takes packs at the same stride. No counter counts the zeros of a padded
// pack.
template <typename T>
__device__ void count_elements(const T* data, int64_t count, int64_t blocks, Counts<T>* counts,
                               Special* special) {
  const int64_t stride = blocks * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for_packs<kTurns, false>(data, count, thread, stride,
                           [&](const auto& pack) { count_pack(pack, counts, special); });
  counts->flush();
}

__device__ inline uint32_t warp_sum(uint32_t value) {
  for (unsigned half = 16; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}

// Adds the sum over the block to `total`.
__device__ void add_sum(uint32_t value, uint32_t* shared, unsigned long long* total) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned long long sum = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += shared[warp];
    if (sum > 0) atomicAdd(total, sum);
  }
  __syncthreads();
}

// Tensors of one kernel, which are its parameters: at most 4 KiB.
template <typename T, int kMost>
struct Batch {
  const T* data[kMost];
  int64_t count[kMost];
  CudaRangeRow* row[kMost];
};

__host__ __device__ int64_t blocks_for(int64_t bytes, int64_t most) {
  const int64_t blocks = bytes / kBlockBytes;
  return blocks < 1 ? 1 : blocks < most ? blocks : most;
}

// The grid has a row of blocks for each tensor, as many as its largest one needs.
template <typename T, int kMost>
__global__ void __launch_bounds__(kThreads, kResident) ranges_kernel(const Batch<T, kMost> batch) {
  const unsigned tensor = kMost == 1 ? 0 : blockIdx.y;
  const int64_t count = batch.count[tensor];
  CudaRangeRow* const row = batch.row[tensor];
  const int64_t blocks = blocks_for(count * static_cast<int64_t>(sizeof(T)), gridDim.x);
  if (blockIdx.x >= blocks) return;
  __shared__ uint32_t sums[kThreads / 32];
  __shared__ unsigned long long maxima[kThreads / 32];
  Counts<T> counts;
  Special special;
  count_elements(batch.data[tensor], count, blocks, &counts, &special);
  constexpr bool kIsF16 = std::is_same_v<T, f16>;
  add_sum(counts.reached[0], sums, &row->reached[0]);
  if constexpr (!kIsF16) add_sum(counts.reached[1], sums, &row->reached[1]);
  add_sum(counts.reached[2], sums, &row->reached[2]);
  if constexpr (!kIsF16) add_sum(counts.reached[3], sums, &row->reached[3]);
  if (__syncthreads_or(special.positive_inf + special.negative_inf + special.nan > 0)) {
    add_sum(special.positive_inf, sums, &row->positive_inf);
    add_sum(special.negative_inf, sums, &row->negative_inf);
    add_sum(special.nan, sums, &row->nan);
  }
  auto largest = static_cast<unsigned long long>(
      __double_as_longlong(widen(std::bit_cast<T>(counts.finite_largest()))));
  for (unsigned half = 16; half > 0; half /= 2) {
    largest = max(largest, __shfl_down_sync(~0u, largest, half));
  }
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = max(largest, maxima[warp]);
  if (largest > 0) atomicMax(&row->amax, largest);
}

struct Tensor {
  TensorView view;
  CudaRangeRow* row;
};

// Enqueues one kernel for at most kMost tensors of type T, all on the current device.
template <typename T, int kMost>
void enqueue(const Tensor* tensors, size_t size) {
  Batch<T, kMost> batch{};
  size_t bytes = 0;
  for (size_t i = 0; i < size; ++i) {
    batch.data[i] = static_cast<const T*>(tensors[i].view.data);
    batch.count[i] = tensors[i].view.count;
    batch.row[i] = tensors[i].row;
    bytes = std::max(bytes, tensors[i].view.bytes());
  }
  const int64_t most = kResident * device_facts().multiprocessors;
  const dim3 grid(static_cast<unsigned>(blocks_for(static_cast<int64_t>(bytes), most)),
                  static_cast<unsigned>(size));
  ranges_kernel<T, kMost><<<grid, kThreads, 0, current_stream()>>>(batch);
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace

/// Records when a copy to the host is complete.
struct CudaRanges::Event {
  Event() { HEADROOM_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

CudaRanges::CudaRanges(int device, size_t rows)
    : device_(device), host_(rows * sizeof(CudaRangeRow)) {
  const DeviceScope scope(device);
  table_ = CudaBuffer(device, rows * sizeof(CudaRangeRow));
  copied_ = std::make_unique<Event>();
}
CudaRanges::~CudaRanges() = default;

void CudaRanges::clear(size_t rows) {
  if (rows == 0) return;
  const DeviceScope scope(device_);
  HEADROOM_CUDA(cudaMemsetAsync(table_.data(), 0, rows * sizeof(CudaRangeRow), current_stream()));
}

void CudaRanges::measure(const std::vector<TensorView>& tensors, size_t row) {
  constexpr size_t kMost = 128;  // tensors of a kernel
  const DeviceScope scope(device_);
  is_f16_.resize(std::max(is_f16_.size(), row + tensors.size()));
  std::array<std::vector<Tensor>, 4> by_type;
  for (const TensorView& tensor : tensors) {
    is_f16_[row] = tensor.dtype == DType::kF16;
    auto* const place = static_cast<CudaRangeRow*>(table_.data()) + row++;
    if (tensor.count > 0) by_type[static_cast<size_t>(tensor.dtype)].push_back({tensor, place});
  }
  for (const std::vector<Tensor>& list : by_type) {
    if (list.empty()) continue;
    with_type<f16, bf16, float, double>(list[0].view.dtype, [&](auto type) {
      using T = decltype(type);
      if (list.size() == 1) return enqueue<T, 1>(list.data(), 1);
      for (size_t i = 0; i < list.size(); i += kMost) {
        enqueue<T, kMost>(&list[i], std::min(kMost, list.size() - i));
      }
    });
  }
}

void CudaRanges::copy_to_host(size_t rows) {
  const DeviceScope scope(device_);
  if (rows > 0) {
    HEADROOM_CUDA(cudaMemcpyAsync(host_.as<void>(), table_.data(), rows * sizeof(CudaRangeRow),
                                  cudaMemcpyDeviceToHost, current_stream()));
  }
  HEADROOM_CUDA(cudaEventRecord(copied_->event, current_stream()));
}

bool CudaRanges::ready() const {
  const cudaError_t state = cudaEventQuery(copied_->event);
  if (state == cudaErrorNotReady) return false;
  HEADROOM_CUDA(state);
  return true;
}

void CudaRanges::wait() const { HEADROOM_CUDA(cudaEventSynchronize(copied_->event)); }

RangeStats CudaRanges::read(size_t row, int64_t count) const {
  RangeStats stats;
  if (count == 0) return stats;
  const CudaRangeRow& found = host_.as<CudaRangeRow>()[row];
  stats.positive_inf = static_cast<int64_t>(found.positive_inf);
  stats.negative_inf = static_cast<int64_t>(found.negative_inf);
  stats.nan = static_cast<int64_t>(found.nan);
  stats.amax = std::bit_cast<double>(found.amax);
  Reached reached{found.reached[0], found.reached[1], found.reached[2], found.reached[3]};
  if (is_f16_[row]) {  // every f16 but zero is kept, and only inf and NaN overflow
    reached.kept = reached.nonzero;
    reached.overflow = found.positive_inf + found.negative_inf + found.nan;
  }
  set_zones(count, reached, &stats);
  return stats;
}

}  // namespace headroom::internal
