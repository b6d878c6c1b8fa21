// For .cu files: checked calls, the caller's stream, conversions and vector loads in kernels.
#ifndef HEADROOM_SRC_CORE_CUDA_CUH_
#define HEADROOM_SRC_CORE_CUDA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <headroom/error.h>
#include <headroom/float16.h>

#include <cstdint>
#include <type_traits>

namespace headroom::internal {

[[noreturn]] void cuda_failed(cudaError_t error, const char* call);

/// Every CUDA call goes through this: throws Error with the text of the call if it fails.
#define HEADROOM_CUDA(call)                                                                      \
  do {                                                                                           \
    const cudaError_t headroom_error = (call);                                                   \
    if (headroom_error != cudaSuccess) ::headroom::internal::cuda_failed(headroom_error, #call); \
  } while (false)

/// The stream of this thread's innermost StreamScope for the current device. Call it inside the
/// DeviceScope of the work.
cudaStream_t current_stream();

/// Makes `device` the current device of this thread, and restores the previous one at the end.
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

/// Properties of the current device, queried once per thread.
struct DeviceFacts {
  int multiprocessors = 0;
  // Kernels may start early. This depends on the code that runs there, not on the device: an sm_75
  // kernel that a newer device compiles from PTX contains no wait for the kernel before.
  bool overlaps = false;
};
const DeviceFacts& device_facts();

/// Launches `kernel` with programmatic dependent launch where it is compiled for it (compute_90 and
/// later): it may start while the previous kernel in the stream still runs, which hides the launch
/// latency. The kernel must call wait_for_kernel_before() before it touches memory that the
/// previous kernel reads or writes.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                  Arguments... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = current_stream();
  config.attrs = &early;
  config.numAttrs = device_facts().overlaps ? 1 : 0;
  HEADROOM_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Allows the next kernel in the stream, if it was launched with launch_early(), to start now.
__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Conversions with hardware instructions. They give the same bits as the reference in float16.h.
__device__ inline float to_float(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float to_float(bf16 x) { return bfloat_bits_to_float(x.bits); }
__device__ inline float to_float(float x) { return x; }
template <typename T>
__device__ inline double widen(T x) {
  return to_float(x);
}
__device__ inline double widen(double x) { return x; }
template <typename T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, f16>) {
    return f16::from_bits(__half_as_ushort(__float2half_rn(x)));
  } else if constexpr (std::is_same_v<T, bf16>) {
    return bf16::from_bits(__bfloat16_as_ushort(__float2bfloat16_rn(x)));
  } else {
    return x;
  }
}

/// kCount elements that are loaded and stored with instructions of up to 16 bytes. The address must
/// be a multiple of alignof(Pack).
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Pack {
  T at[kCount];

  // The unit of one load or store. The compiler does not reliably merge element-wise copies.
  using Word = std::conditional_t<
      kCount * sizeof(T) == 2, uint16_t,
      std::conditional_t<kCount * sizeof(T) == 4, uint32_t,
                         std::conditional_t<kCount * sizeof(T) == 8, uint2, uint4>>>;
  static constexpr int kWords = kCount * sizeof(T) / sizeof(Word);
};

template <int kCount, typename T>
__device__ inline Pack<T, kCount> load_pack(const T* from) {
  using Word = typename Pack<T, kCount>::Word;
  Pack<T, kCount> pack;
  auto* words = reinterpret_cast<Word*>(&pack);
#pragma unroll
  for (int i = 0; i < pack.kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  return pack;
}

/// Loads 16 bytes and marks their cache line "evict last", so that it stays in the L2 cache for the
/// kernel that reads it next. Before compute_80, which has no such hint, a plain load.
template <int kCount, typename T>
__device__ inline Pack<T, kCount> load_and_keep(const T* from) {
  static_assert(kCount * sizeof(T) == sizeof(uint4));
#if __CUDA_ARCH__ >= 800
  uint64_t keep;
  uint4 words;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  asm("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from), "l"(keep));
  return *reinterpret_cast<const Pack<T, kCount>*>(&words);
#else
  return load_pack<kCount>(from);
#endif
}

template <int kCount, typename T>
__device__ inline void store_pack(T* to, const Pack<T, kCount>& pack) {
  using Word = typename Pack<T, kCount>::Word;
  const auto* words = reinterpret_cast<const Word*>(&pack);
#pragma unroll
  for (int i = 0; i < pack.kWords; ++i) reinterpret_cast<Word*>(to)[i] = words[i];
}

__host__ __device__ inline bool aligned_16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

/// Calls visit(pack) for packs `first`, `first` + `stride`, ... of 16 bytes, of which kTurns are
/// loaded at a time. Single elements, at the end or at unaligned addresses, are passed in a pack
/// padded with zeros. kKeep: loads keep the data in the L2 cache.
template <int kTurns, bool kKeep, typename T, typename Index, typename Visit>
__device__ inline void for_packs(const T* data, Index count, Index first, Index stride,
                                 const Visit& visit) {
  constexpr int kPack = 16 / sizeof(T);
  const auto load = [&](Index pack) {
    if constexpr (kKeep) return load_and_keep<kPack>(data + pack * kPack);
    if constexpr (!kKeep) return load_pack<kPack>(data + pack * kPack);
  };
  Index i = 0;
  if (aligned_16(data)) {
    const Index whole = count / kPack;
    Index p = first;
    for (; p + (kTurns - 1) * stride < whole; p += kTurns * stride) {
      Pack<T, kPack> packs[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) packs[turn] = load(p + turn * stride);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) visit(packs[turn]);
    }
    for (; p < whole; p += stride) visit(load(p));
    i = whole * kPack;
  }
  for (i += first; i < count; i += stride) {
    Pack<T, kPack> pack{};
    pack.at[0] = data[i];
    visit(pack);
  }
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CUDA_CUH_
