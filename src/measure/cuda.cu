// One kernel reads all tensors. Blocks take pieces of the list in a fixed order, so that each adds
// up the same elements in every run; the last block to finish adds up the blocks, in order.
#include "measure/cuda.h"

#include <headroom/error.h>

#include <algorithm>
#include <map>
#include <memory>

#include "core/cuda.cuh"
#include "core/cuda.h"

namespace headroom::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 32768;  // elements

// Blocks on a multiprocessor. Few with many loads on the way each are faster than many: an H200
// reads at 97 to 102 % of its copying speed with 3, at 82 with 4 or 5.
constexpr int kResident = 3;

struct CudaTensor {
  void* data;
  int64_t count;
  int64_t first_piece;
  DType dtype;
};

// What a block found, and in the end what all did. The sum is split by magnitude, so that neither
// the squares of large f64 values overflow nor those of small ones vanish.
struct CudaPartial {
  double squares[3];  // of small x 2^600, ordinary, and large x 2^-600 elements
  double amax;
  int64_t inf, nan;
  int64_t culprit, culprit_inf, culprit_nan;
  int64_t new_inf, new_zeros;
};

// Magnitudes as integers. A thread's share whose largest is below kMost, and zero or not below
// kLeast, can be squared without care.
template <typename T>
struct Bits;
template <>
struct Bits<f16> {
  using Type = uint32_t;
  static constexpr Type kInf = 0x7C00u;
  static constexpr Type kLeast = 1, kMost = kInf;
  __device__ static Type of(f16 x) { return x.bits & 0x7FFFu; }
};
template <>
struct Bits<bf16> {
  using Type = uint32_t;
  static constexpr Type kInf = 0x7F80u;
  static constexpr Type kLeast = (127 - 50) << 7, kMost = (127 + 60) << 7;
  __device__ static Type of(bf16 x) { return x.bits & 0x7FFFu; }
};
template <>
struct Bits<float> {
  using Type = uint32_t;
  static constexpr Type kInf = 0x7F800000u;
  static constexpr Type kLeast = 1, kMost = kInf;
  __device__ static Type of(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
};
template <>
struct Bits<double> {
  using Type = unsigned long long;
  static constexpr Type kInf = 0x7FF0000000000000ull;
  static constexpr Type kLeast = 1, kMost = kInf;
  __device__ static Type of(double x) { return __double_as_longlong(x) & 0x7FFFFFFFFFFFFFFFll; }
};

__device__ inline double widen(f16 x) { return to_float(x); }
__device__ inline double widen(bf16 x) { return to_float(x); }
__device__ inline double widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

// Squares that are added up, by magnitude.
struct Squares {
  double of[3] = {0.0, 0.0, 0.0};

  // Right for all finite values.
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

  // Adds a few 16-bit values in FP32 first, whose squares it has to hold: see Bits.
  template <typename T, int kCount>
  __device__ void add_pack(const Pack<T, kCount>& pack) {
    if constexpr (sizeof(T) == 2) {
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const float x = to_float(pack.at[e]);
        sum += x * x;
      }
      of[1] += static_cast<double>(sum);
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) add(pack.at[e]);
    }
  }
  __device__ void add(const Squares& other) {
    for (int i = 0; i < 3; ++i) of[i] += other.of[i];
  }
};

// One thread's share of a piece: calls visit(pack of n elements) for its elements.
template <typename T, typename Visit>
__device__ void for_elements(const T* data, int count, const Visit& visit) {
  constexpr int kPack = 16 / sizeof(T);
  const auto thread = static_cast<int>(threadIdx.x);
  int i = 0;
  if (aligned_16(data)) {
    constexpr int kTurns = 8;  // packs that a thread has on the way
    const int whole = count / kPack;
    int p = thread;
    for (; p + (kTurns - 1) * kThreads < whole; p += kTurns * kThreads) {
      Pack<T, kPack> packs[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        packs[turn] = load_pack<kPack>(data + (p + turn * kThreads) * kPack);
      }
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) visit(packs[turn]);
    }
    for (; p < whole; p += kThreads) visit(load_pack<kPack>(data + p * kPack));
    i = whole * kPack;
  }
  for (i += thread; i < count; i += kThreads) {
    Pack<T, kPack> pack{};
    pack.at[0] = data[i];
    visit(pack);
  }
}

// Adds this thread's share of one piece to its `partial`.
template <typename T>
__device__ void measure_piece(T* data, int count, int64_t tensor, CudaPartial* partial,
                              Squares* squares) {
  using B = Bits<T>;
  typename B::Type largest = 0;
  Squares sums;
  for_elements(data, count, [&](const auto& pack) {
    for (const T& x : pack.at) largest = max(largest, B::of(x));
    sums.add_pack(pack);
  });
  double amax = 0.0;
  const bool ordinary = largest < B::kMost && (largest == 0 || largest >= B::kLeast);
  if (ordinary) {
    if constexpr (std::is_same_v<T, double>) {
      amax = __longlong_as_double(static_cast<long long>(largest));
    } else if constexpr (std::is_same_v<T, float>) {
      amax = __uint_as_float(largest);
    } else {
      amax = to_float(T::from_bits(static_cast<uint16_t>(largest)));
    }
    squares->add(sums);
    partial->amax = fmax(partial->amax, amax);
    return;
  }
  // Something here is not finite, or its square is beyond FP32: look at each element again.
  int inf = 0, nan = 0;
  Squares finite;
  for_elements(data, count, [&](const auto& pack) {
    for (const T& x : pack.at) {
      const auto bits = B::of(x);
      inf += bits == B::kInf;
      nan += bits > B::kInf;
      if (bits >= B::kInf) continue;
      amax = fmax(amax, fabs(widen(x)));
      finite.add(x);
    }
  });
  squares->add(finite);
  partial->amax = fmax(partial->amax, amax);
  partial->inf += inf;
  partial->nan += nan;
  if (inf + nan == 0) return;
  if (partial->culprit < 0) partial->culprit = tensor;
  if (partial->culprit == tensor) {
    partial->culprit_inf += inf;
    partial->culprit_nan += nan;
  }
}

template <typename T>
__device__ void unscale_piece(T* data, int count, float inverse, CudaPartial* partial) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const T before = data[i];
    T after;
    if constexpr (std::is_same_v<T, double>) {
      after = before * static_cast<double>(inverse);
    } else {
      after = from_float<T>(to_float(before) * inverse);
    }
    data[i] = after;
    const bool was_finite = Bits<T>::of(before) < Bits<T>::kInf;
    partial->new_inf += was_finite && Bits<T>::of(after) >= Bits<T>::kInf;
    partial->new_zeros += Bits<T>::of(before) != 0 && Bits<T>::of(after) == 0;
  }
}

template <typename T>
__device__ void do_piece(void* data, int64_t first, int count, int64_t tensor, bool unscale,
                         float inverse, CudaPartial* partial, Squares* squares) {
  T* const piece = static_cast<T*>(data) + first;
  measure_piece(piece, count, tensor, partial, squares);
  if (unscale) __syncthreads();  // each thread unscales other elements than it measured
  if (unscale) unscale_piece(piece, count, inverse, partial);
}

// `part` comes from a thread or block that is later in the order.
__device__ void merge(const CudaPartial& part, CudaPartial* whole) {
  for (int i = 0; i < 3; ++i) whole->squares[i] += part.squares[i];
  whole->amax = fmax(whole->amax, part.amax);
  whole->inf += part.inf;
  whole->nan += part.nan;
  whole->new_inf += part.new_inf;
  whole->new_zeros += part.new_zeros;
  if (part.culprit < 0) return;
  if (whole->culprit < 0 || part.culprit < whole->culprit) {
    whole->culprit = part.culprit;
    whole->culprit_inf = 0;
    whole->culprit_nan = 0;
  }
  if (part.culprit == whole->culprit) {
    whole->culprit_inf += part.culprit_inf;
    whole->culprit_nan += part.culprit_nan;
  }
}

// Of all threads, to thread 0, in a fixed order.
__device__ void reduce_block(CudaPartial* shared, const CudaPartial& mine) {
  shared[threadIdx.x] = mine;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) merge(shared[threadIdx.x + half], &shared[threadIdx.x]);
  }
  __syncthreads();
}

__device__ CudaPartial empty_partial() {
  CudaPartial partial{};
  partial.culprit = -1;
  return partial;
}

// The tensor that a piece belongs to: the last one that begins at or before it, `from` or later.
__device__ int tensor_of(const CudaTensor* tensors, int count, int64_t piece, int from) {
  int low = from, high = count - 1;
  for (int i = 0; i < 3; ++i) {  // mostly it is near
    if (low == high || tensors[low + 1].first_piece > piece) return low;
    ++low;
  }
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (tensors[middle].first_piece <= piece) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads, kResident)
    measure_kernel(const CudaTensor* tensors, int count, int64_t pieces, bool unscale,
                   float inverse, CudaPartial* blocks, unsigned* finished, CudaPartial* result) {
  __shared__ CudaPartial shared[kThreads];
  __shared__ bool last;
  CudaPartial mine = empty_partial();
  Squares squares;
  int t = 0;
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    t = tensor_of(tensors, count, piece, t);
    const CudaTensor tensor = tensors[t];
    const int64_t first = (piece - tensor.first_piece) * kPiece;
    const int size = static_cast<int>(min(static_cast<int64_t>(kPiece), tensor.count - first));
    switch (tensor.dtype) {
      case DType::kF16:
        do_piece<f16>(tensor.data, first, size, t, unscale, inverse, &mine, &squares);
        break;
      case DType::kBF16:
        do_piece<bf16>(tensor.data, first, size, t, unscale, inverse, &mine, &squares);
        break;
      case DType::kF32:
        do_piece<float>(tensor.data, first, size, t, unscale, inverse, &mine, &squares);
        break;
      case DType::kF64:
        do_piece<double>(tensor.data, first, size, t, unscale, inverse, &mine, &squares);
        break;
    }
  }
  for (int i = 0; i < 3; ++i) mine.squares[i] = squares.of[i];
  reduce_block(shared, mine);
  if (threadIdx.x == 0) {
    blocks[blockIdx.x] = shared[0];
    __threadfence();
    last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  CudaPartial all = empty_partial();
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kThreads) merge(blocks[b], &all);
  reduce_block(shared, all);
  if (threadIdx.x == 0) {
    *result = shared[0];
    *finished = 0;
  }
}

// Memory that the calls of one thread on one device share; each call waits for its end.
class Workspace {
 public:
  static Workspace& of(int device) {
    thread_local std::map<int, std::unique_ptr<Workspace>> all;
    auto& mine = all[device];
    if (mine == nullptr) mine = std::make_unique<Workspace>(device);
    return *mine;
  }

  explicit Workspace(int device)
      : device_(device),
        blocks_(kResident * multiprocessors()),
        partials_(device, static_cast<size_t>(blocks_ + 1) * sizeof(CudaPartial)),
        finished_(device, sizeof(unsigned)) {}

  CudaPartial measure(const std::vector<CudaTensor>& tensors, int64_t pieces,
                      const MeasureJob& job) {
    const cudaStream_t stream = current_stream();
    if (tensors.size() > capacity_) {
      capacity_ = 2 * tensors.size();
      table_ = CudaBuffer(device_, capacity_ * sizeof(CudaTensor));
    }
    HEADROOM_CUDA(cudaMemcpyAsync(table_.data(), tensors.data(),
                                  tensors.size() * sizeof(CudaTensor), cudaMemcpyHostToDevice,
                                  stream));
    auto* const partials = static_cast<CudaPartial*>(partials_.data());
    CudaPartial* const result = partials + blocks_;
    const auto grid = static_cast<unsigned>(std::min<int64_t>(pieces, blocks_));
    measure_kernel<<<grid, kThreads, 0, stream>>>(
        static_cast<const CudaTensor*>(table_.data()), static_cast<int>(tensors.size()), pieces,
        job.unscale, job.inverse_scale, partials, static_cast<unsigned*>(finished_.data()), result);
    HEADROOM_CUDA(cudaGetLastError());
    CudaPartial found;
    cuda_copy(&found, result, sizeof(found));
    return found;
  }

 private:
  int device_;
  int blocks_;
  CudaBuffer partials_;
  CudaBuffer finished_;
  CudaBuffer table_;
  size_t capacity_ = 0;
};

}  // namespace

Partial cuda_measure(const std::vector<TensorView>& list, const MeasureJob& job) {
  if (job.detail) {
    throw Error(ErrorCode::kUnsupported,
                "Counts by magnitude are made on the CPU only; copy the gradients there.");
  }
  Partial out;
  std::vector<CudaTensor> tensors;
  int64_t pieces = 0;
  for (const TensorView& view : list) {
    tensors.push_back({view.data, view.count, pieces, view.dtype});
    pieces += (view.count + kPiece - 1) / kPiece;
    out.stats.count += view.count;
  }
  if (pieces == 0) return out;
  const DeviceScope scope(list[0].device.index);
  const CudaPartial found = Workspace::of(list[0].device.index).measure(tensors, pieces, job);
  out.stats.amax = found.amax;
  for (int i = 0; i < 3; ++i) out.stats.squares.add({found.squares[i], 600 * (i - 1)});
  out.stats.inf_count = found.inf;
  out.stats.nan_count = found.nan;
  out.stats.culprit = found.culprit;
  out.stats.culprit_inf = found.culprit_inf;
  out.stats.culprit_nan = found.culprit_nan;
  out.new_inf = found.new_inf;
  out.new_zeros = found.new_zeros;
  return out;
}

}  // namespace headroom::internal
