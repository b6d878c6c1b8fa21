// One kernel reads all tensors of a list. Every block takes the same pieces in every run, and the
// last block to finish adds the results of all blocks in a fixed order. The result is therefore
// reproducible: no floating-point number goes through an atomic operation.
#include "measure/cuda.h"

#include <headroom/error.h>

#include <algorithm>
#include <map>

#include "core/cuda.cuh"
#include "core/element.h"
#include "measure/stats.h"

namespace headroom::internal {
namespace {

constexpr int kThreads = 256;

// Size of a piece. The small one is what the threads of a block load at once. Larger ones amortise
// the start of a piece, but are used only where every block still gets kRounds pieces, so that all
// blocks finish at about the same time.
constexpr int64_t kSmallPiece = 32 << 10;
constexpr int64_t kLargePiece = 128 << 10;
constexpr int64_t kRounds = 8;

// Bytes at the end of the list that should stay in the L2 cache: apply/ walks the list backwards
// and reads them first.
constexpr int64_t kKept = 32 << 20;

// Blocks per multiprocessor. Few blocks with many outstanding loads each are faster than many
// blocks: an H200 reads at 97 to 102 % of its copy bandwidth with 3, and at 82 % with 4 or 5.
constexpr int kResident = 3;

__host__ __device__ int64_t bytes_of(int64_t count, DType dtype) {
  return count * static_cast<int64_t>(size_of(dtype));
}

__host__ __device__ int64_t pieces_of(int64_t count, DType dtype, int64_t piece_bytes) {
  return (bytes_of(count, dtype) + piece_bytes - 1) / piece_bytes;
}

__device__ inline float2 to_floats(f16 a, f16 b) {
  return __half22float2(__halves2half2(__ushort_as_half(a.bits), __ushort_as_half(b.bits)));
}
__device__ inline float2 to_floats(bf16 a, bf16 b) { return {to_float(a), to_float(b)}; }

// The largest magnitude so far, as an integer. 16-bit elements are compared two at a time with a
// SIMD instruction on 32-bit words.
template <typename T>
struct Largest {
  typename Element<T>::Bits value = 0;
  template <int kCount>
  __device__ void add(const Pack<T, kCount>& pack) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) value = max(value, magnitude_of(pack.at[e]));
  }
  __device__ typename Element<T>::Bits of_all() const { return value; }
};
template <typename T>
requires(sizeof(T) == 2) struct Largest<T> {
  uint32_t pair = 0;
  template <int kCount>
  __device__ void add(const Pack<T, kCount>& pack) {
#pragma unroll
    for (int p = 0; p < kCount / 2; ++p) {
      const uint32_t word = pack.at[2 * p].bits | static_cast<uint32_t>(pack.at[2 * p + 1].bits)
                                                      << 16;
      pair = __vmaxu2(pair, word & 0x7FFF7FFFu);
    }
  }
  __device__ uint16_t of_all() const {
    return static_cast<uint16_t>(max(pair & 0xFFFFu, pair >> 16));
  }
};

// Sums of squares by magnitude, as in GradStats::squares.
struct Squares {
  double of[3] = {0.0, 0.0, 0.0};

  // Exact for all finite values up to the rounding of the sum.
  template <typename T>
  __device__ void add(T x) {
    const double value = widen(x);
    if constexpr (std::is_same_v<T, double>) {
      const double size = fabs(value);
      const int which = size >= 0x1p450 ? 2 : size < 0x1p-450 ? 0 : 1;
      const double factor = which == 2 ? 0x1p-600 : which == 0 ? 0x1p600 : 1.0;
      const double scaled = value * factor;
      of[which] += scaled * scaled;
    } else {
      of[1] += value * value;
    }
  }

  // Adds one pack. Squares of 16-bit elements are first added in FP32, which is much faster than
  // double and right only within SquareLimits. The square of a float is exact in double, so that
  // fma() rounds like an add.
  template <typename T, int kCount>
  __device__ void add_pack(const Pack<T, kCount>& pack) {
    if constexpr (sizeof(T) == 2) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int p = 0; p < kCount / 2; ++p) {
        const float2 x = to_floats(pack.at[2 * p], pack.at[2 * p + 1]);
        even = fmaf(x.x, x.x, even);
        odd = fmaf(x.y, x.y, odd);
      }
      of[1] += static_cast<double>(even + odd);
    } else if constexpr (sizeof(T) == 4) {
      const double a = pack.at[0], b = pack.at[1], c = pack.at[2], d = pack.at[3];
      of[1] += fma(a, a, b * b) + fma(c, c, d * d);
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) add(pack.at[e]);
    }
  }
  __device__ void add(const Squares& other) {
    for (int i = 0; i < 3; ++i) of[i] += other.of[i];
  }
};

// Calls visit(pack) for the elements of a piece that belong to this thread.
template <bool kKeep, typename T, typename Visit>
__device__ void for_elements(const T* data, int count, const Visit& visit) {
  constexpr int kTurns = 8;  // outstanding loads per thread
  for_packs<kTurns, kKeep>(data, count, static_cast<int>(threadIdx.x), kThreads, visit);
}

// Adds this thread's elements of one piece to its `partial`. They are first summed without checks;
// the largest magnitude then says whether the sums can be used.
template <typename T>
__device__ void measure_piece(T* data, int count, int64_t tensor, bool keep, GradStats* partial,
                              Squares* squares) {
  Largest<T> found;
  Squares sums;
  const auto visit = [&](const auto& pack) {
    found.add(pack);
    sums.add_pack(pack);
  };
  if (keep) {
    for_elements<true>(data, count, visit);
  } else {
    for_elements<false>(data, count, visit);
  }
  const auto largest = found.of_all();
  using Limits = SquareLimits<T>;
  if (largest < Limits::kTooLarge && (largest == 0 || largest >= Limits::kTooSmall)) {
    squares->add(sums);
    partial->amax = fmax(partial->amax, widen(std::bit_cast<T>(largest)));
    return;
  }
  // Read the elements again, one at a time.
  double amax = 0.0;
  int inf = 0, nan = 0;
  Squares finite;
  for_elements<false>(data, count, [&](const auto& pack) {
    for (const T& x : pack.at) {
      const auto magnitude = magnitude_of(x);
      inf += magnitude == Element<T>::kInf;
      nan += magnitude > Element<T>::kInf;
      if (magnitude >= Element<T>::kInf) continue;
      amax = fmax(amax, fabs(widen(x)));
      finite.add(x);
    }
  });
  squares->add(finite);
  partial->amax = fmax(partial->amax, amax);
  add_bad(tensor, inf, nan, partial);
}

// Multiplies a piece in place. Threads write other elements than they have measured, so the block
// synchronises first.
template <typename T>
__device__ void unscale_piece(T* data, int count, float inverse, GradStats* partial) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const T before = data[i];
    T after;
    if constexpr (std::is_same_v<T, double>) {
      after = before * static_cast<double>(inverse);
    } else {
      after = from_float<T>(to_float(before) * inverse);
    }
    data[i] = after;
    const bool was_finite = magnitude_of(before) < Element<T>::kInf;
    partial->new_inf += was_finite && magnitude_of(after) >= Element<T>::kInf;
    partial->new_zeros += magnitude_of(before) != 0 && magnitude_of(after) == 0;
  }
}

// Whether any field besides amax and the ordinary squares is used.
__device__ bool unusual(const GradStats& stats) {
  return stats.culprit >= 0 || stats.new_inf + stats.new_zeros > 0 || stats.squares[0] != 0.0 ||
         stats.squares[2] != 0.0;
}

// Merges the results of all threads into shared[0], in a fixed order.
__device__ void reduce_block(GradStats* shared, const GradStats& mine) {
  // The common case reduces two numbers with warp shuffles; merging the whole struct is slow.
  if (!__syncthreads_or(unusual(mine))) {
    double sum = mine.squares[1], amax = mine.amax;
    for (unsigned half = 16; half > 0; half /= 2) {
      sum += __shfl_down_sync(~0u, sum, half);
      amax = fmax(amax, __shfl_down_sync(~0u, amax, half));
    }
    GradStats& warp = shared[threadIdx.x / 32];
    if (threadIdx.x == 0) warp = mine;
    if (threadIdx.x % 32 == 0) {
      warp.squares[1] = sum;
      warp.amax = amax;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (unsigned i = 1; i < kThreads / 32; ++i) {
        shared[0].squares[1] += shared[i].squares[1];
        shared[0].amax = fmax(shared[0].amax, shared[i].amax);
      }
    }
    __syncthreads();
    return;
  }
  shared[threadIdx.x] = mine;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) merge(shared[threadIdx.x + half], &shared[threadIdx.x]);
  }
  __syncthreads();
}

// Fills the table that maps a piece to its tensor. Block i does so for tensor i.
__global__ void owner_kernel(const CudaTensor* tensors, int64_t piece_bytes, uint32_t* owners) {
  const CudaTensor& tensor = tensors[blockIdx.x];
  const int64_t pieces = pieces_of(tensor.count, tensor.dtype, piece_bytes);
  for (int64_t i = threadIdx.x; i < pieces; i += blockDim.x) {
    owners[tensor.first_piece + i] = blockIdx.x;
  }
}

__global__ void __launch_bounds__(kThreads, kResident)
    measure_kernel(const CudaTensor* tensors, const uint32_t* owners, int64_t pieces,
                   int64_t piece_bytes, MeasureJob job, int64_t count, GradStats* blocks,
                   unsigned* finished, GradStats* result) {
  // Raw bytes: shared memory cannot have constructors.
  __shared__ alignas(GradStats) unsigned char shared_bytes[kThreads * sizeof(GradStats)];
  auto* const shared = reinterpret_cast<GradStats*>(shared_bytes);
  __shared__ bool last;
  const float inverse = job.device_factor != nullptr ? *job.device_factor : job.inverse_scale;
  if (job.skip_at_one && inverse == 1.0f) return;
  GradStats mine;
  Squares squares;
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const uint32_t t = owners[piece];
    const CudaTensor tensor = tensors[t];
    const bool keep = (pieces - piece) * piece_bytes <= kKept;
    with_type<f16, bf16, float, double>(tensor.dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t whole = piece_bytes / static_cast<int64_t>(sizeof(T));
      const int64_t first = (piece - tensor.first_piece) * whole;
      const int size = static_cast<int>(min(whole, tensor.count - first));
      T* const data = static_cast<T*>(tensor.data) + first;
      measure_piece(data, size, t, keep, &mine, &squares);
      if (job.unscale) unscale_piece(data, size, inverse, &mine);
    });
  }
  for (int i = 0; i < 3; ++i) mine.squares[i] = squares.of[i];
  reduce_block(shared, mine);
  // The fence before the counter makes this block's result visible to whichever block counts last;
  // the one after it keeps the last block from reading stale results.
  if (threadIdx.x == 0) {
    blocks[blockIdx.x] = shared[0];
    __threadfence();
    last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  GradStats all;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kThreads) merge(blocks[b], &all);
  reduce_block(shared, all);
  if (threadIdx.x == 0) {
    *result = shared[0];
    result->count = count;
    *finished = 0;  // for the next launch
  }
}

// A block writes zeros to one tensor at a time.
__global__ void clear_kernel(const CudaTensor* tensors, unsigned count, const bool* keep) {
  if (*keep) return;
  for (unsigned t = blockIdx.x; t < count; t += gridDim.x) {
    auto* const data = static_cast<unsigned char*>(tensors[t].data);
    const int64_t bytes = bytes_of(tensors[t].count, tensors[t].dtype);
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) data[i] = 0;
  }
}

}  // namespace

CudaMeasure::CudaMeasure(int device) : device_(device) {
  const DeviceScope scope(device);
  blocks_ = kResident * device_facts().multiprocessors;
  partials_.reserve(device, static_cast<size_t>(blocks_ + 1));
  finished_.reserve(device, 1);
}

GradStats CudaMeasure::wait() const {
  GradStats found;
  cuda_copy(device_, &found, stats(), sizeof(found));
  return found;
}

void CudaMeasure::set_list(const std::vector<TensorView>& list) {
  int64_t bytes = 0;
  int64_t count = 0;
  for (const TensorView& view : list) {
    bytes += static_cast<int64_t>(view.bytes());
    count += view.count;
  }
  int64_t piece_bytes = kSmallPiece;
  while (piece_bytes < kLargePiece && bytes > kRounds * blocks_ * 2 * piece_bytes) piece_bytes *= 2;
  std::vector<CudaTensor> tensors;
  tensors.reserve(list.size());
  int64_t pieces = 0;
  for (const TensorView& view : list) {
    tensors.push_back({view.data, view.count, pieces, view.dtype});
    pieces += pieces_of(view.count, view.dtype, piece_bytes);
  }
  if (tensors == tensors_) return;
  const DeviceScope scope(device_);
  tensors_.clear();  // if something below throws, the list is empty
  pieces_ = 0;
  count_ = 0;
  table_.reserve(device_, tensors.size());
  owners_.reserve(device_, static_cast<size_t>(pieces));
  if (tensors.empty()) return;
  cuda_upload(table_.data(), tensors.data(), tensors.size() * sizeof(CudaTensor));
  owner_kernel<<<static_cast<unsigned>(tensors.size()), 128, 0, current_stream()>>>(
      table_.data(), piece_bytes, owners_.data());
  HEADROOM_CUDA(cudaGetLastError());
  tensors_ = std::move(tensors);
  pieces_ = pieces;
  piece_bytes_ = piece_bytes;
  count_ = count;
}

void CudaMeasure::enqueue_clear(const bool* keep) {
  if (tensors_.empty()) return;
  const DeviceScope scope(device_);
  clear_kernel<<<static_cast<unsigned>(blocks_), kThreads, 0, current_stream()>>>(
      table_.data(), static_cast<unsigned>(tensors_.size()), keep);
  HEADROOM_CUDA(cudaGetLastError());
}

void CudaMeasure::enqueue(const MeasureJob& job) {
  const DeviceScope scope(device_);
  GradStats* const partials = partials_.data();
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(pieces_, 1, blocks_));
  measure_kernel<<<grid, kThreads, 0, current_stream()>>>(table_.data(), owners_.data(), pieces_,
                                                          piece_bytes_, job, count_, partials,
                                                          finished_.data(), partials + blocks_);
  HEADROOM_CUDA(cudaGetLastError());
}

GradStats cuda_measure(const std::vector<TensorView>& list, const MeasureJob& job,
                       GradDetail* detail) {
  // Reused by all calls of this thread; each call waits for its own result.
  thread_local std::map<int, CudaMeasure> all;
  const int device = list[0].device.index;
  CudaMeasure& mine = all.try_emplace(device, device).first->second;
  if (detail != nullptr) cuda_detail(list, detail);
  mine.set_list(list);
  mine.enqueue(job);
  return mine.wait();
}

}  // namespace headroom::internal
