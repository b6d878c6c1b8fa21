// The step kernels for compact formats of masters and moments, see formats.h. As in cuda.cu, a
// block updates one piece; a thread updates eight elements, and four threads share a group of
// moments.
//
// What bounds these kernels is as much arithmetic as memory: they move 12 bytes per element and
// have some 80 instructions' time for it. So bytes are converted four at a time.
#include "apply/cuda.cuh"
#include "apply/formats.h"
#include "core/cuda.cuh"

namespace headroom::internal {
namespace {

constexpr int kResident = 4;  // blocks on a multiprocessor; limits registers
constexpr int kEach = 8;      // elements of a thread
static_assert(kStepThreads * kEach == kPiece);
constexpr unsigned kWarp = 0xFFFFFFFFu;

// Up to kEach elements in registers, zeros behind `count`. `whole`: they can be loaded at once.
template <typename T>
__device__ Pack<T, kEach> load(const T* from, int count, bool whole) {
  if (whole) return load_pack<kEach>(from);
  Pack<T, kEach> pack{};
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e < count) pack.at[e] = from[e];
  }
  return pack;
}

template <typename T>
__device__ void store(T* to, const Pack<T, kEach>& pack, int count, bool whole) {
  if (whole) return store_pack(to, pack);
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e < count) to[e] = pack.at[e];
  }
}

// The lowest bytes of four words.
__device__ inline uint32_t pack_bytes(const uint32_t* words) {
  return __byte_perm(__byte_perm(words[0], words[1], 0x0040),
                     __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

__device__ inline uint32_t byte_of(uint32_t word, int i) { return (word >> (8 * i)) & 0xFFu; }

// What a thread holds of an array of bytes.
using Bytes = Pack<uint8_t, kEach>;
__device__ inline uint32_t word_of(const Bytes& bytes, int i) {
  return reinterpret_cast<const uint32_t*>(&bytes)[i];
}
__device__ inline Bytes bytes_of(const uint32_t* words) {
  const uint2 both = {pack_bytes(words), pack_bytes(words + 4)};
  return *reinterpret_cast<const Bytes*>(&both);
}

// The largest of the four threads of a group.
__device__ inline uint32_t largest_of_group(uint32_t mine) {
  mine = larger(mine, __shfl_xor_sync(kWarp, mine, 1));
  return larger(mine, __shfl_xor_sync(kWarp, mine, 2));
}

// Moments of a thread as FP32 values, and how they are loaded and stored.
template <typename Code>
struct ByteMoments {
  uint8_t* codes;
  uint8_t* exponents;

  __device__ ByteMoments(const StateArrays& arrays, int moment, int64_t at)
      : codes(static_cast<uint8_t*>(arrays.moments[moment]) + at),
        exponents(arrays.exponents[moment] + at / kGroupSize) {}

  __device__ void load(int count, bool whole, float* values) const {
    const Bytes bytes = internal::load(codes, count, whole);
    const uint32_t exponent = count > 0 ? *exponents : 0;
    for (int i = 0; i < 2; ++i) decode(word_of(bytes, i), exponent, values + 4 * i);
    if (whole) return;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (e >= count) values[e] = 0.0f;  // a code of 0 is not always 0
    }
  }

  __device__ void store(const float* values, const uint32_t* random, int count, bool whole) const {
    uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) largest = larger(largest, moment_magnitude(values[e]));
    const uint32_t exponent = Code::exponent(largest_of_group(largest));
    uint32_t words[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) words[e] = encode(values[e], exponent, random[e]);
    internal::store(codes, bytes_of(words), count, whole);
    if (count > 0 && threadIdx.x % 4 == 0) *exponents = static_cast<uint8_t>(exponent);
  }

 private:
  // Codes of first moments have the bits of f16, but for the place of the sign.
  __device__ static void decode(uint32_t word, uint32_t exponent, float* values) {
    if constexpr (std::is_same_v<Code, FirstMoment>) {
      const float factor = bits_float(exponent << 23);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t high = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
        const uint32_t bits = (high & 0x80008000u) | (high >> 1 & 0x3F803F80u);
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&bits));
        values[2 * i] = pair.x * factor;
        values[2 * i + 1] = pair.y * factor;
      }
    } else {
      const uint32_t first = Code::first_bits(exponent);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = bits_float((byte_of(word, i) << 20) + first);
    }
  }

  __device__ static uint32_t encode(float value, uint32_t exponent, uint32_t random) {
    constexpr bool kFirst = std::is_same_v<Code, FirstMoment>;
    return Code::encode(value, exponent, kFirst ? first_dither(random) : second_dither(random));
  }
};

template <typename Code>
struct HalfMoments {
  bf16* values16;

  __device__ HalfMoments(const StateArrays& arrays, int moment, int64_t at)
      : values16(static_cast<bf16*>(arrays.moments[moment]) + at) {}

  __device__ void load(int count, bool whole, float* values) const {
    const auto pack = internal::load(values16, count, whole);
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = to_float(pack.at[e]);
  }

  __device__ void store(const float* values, const uint32_t* random, int count, bool whole) const {
    constexpr bool kFirst = std::is_same_v<Code, FirstMoment>;
    Pack<bf16, kEach> pack;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t dither = kFirst ? first_dither(random[e]) : second_dither(random[e]);
      pack.at[e] = encode_moment(values[e], half_dither(dither));
    }
    internal::store(values16, pack, count, whole);
  }
};

// Weights of a thread: 16-bit ones with what is below them, or FP32 ones.
template <typename W, StateFormat kFormat>
struct Weights {
  static constexpr int kBits = kFormat == StateFormat::kByte ? 8 : 16;
  using Split = SplitMaster<W, kBits>;
  using Remainder = typename Split::Remainder;
  W* weight;
  Remainder* below;

  __device__ Weights(const CudaSlot& slot, int64_t at)
      : weight(static_cast<W*>(slot.weight) + at),
        below(static_cast<Remainder*>(slot.state.master) + at) {}

  __device__ void load(int count, bool whole, float* values) const {
    const auto upper = internal::load(weight, count, whole);
    const auto lower = internal::load(below, count, whole);
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = Split{upper.at[e], lower.at[e]}.join();
  }

  __device__ void store(const float* values, const uint32_t* random, int count, bool whole) const {
    Pack<W, kEach> upper;
    Pack<Remainder, kEach> lower;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Split both = Split::split(values[e], master_dither<Split::kDropped>(random[e]));
      upper.at[e] = both.weight;
      lower.at[e] = both.remainder;
    }
    internal::store(weight, upper, count, whole);
    internal::store(below, lower, count, whole);
  }
};

template <StateFormat kFormat>
struct Weights<float, kFormat> {
  float* weight;

  __device__ Weights(const CudaSlot& slot, int64_t at)
      : weight(static_cast<float*>(slot.state.master) + at) {}

  __device__ void load(int count, bool whole, float* values) const {
    const auto pack = internal::load(weight, count, whole);
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = pack.at[e];
  }
  __device__ void store(const float* values, const uint32_t*, int count, bool whole) const {
    Pack<float, kEach> pack;
#pragma unroll
    for (int e = 0; e < kEach; ++e) pack.at[e] = values[e];
    internal::store(weight, pack, count, whole);
  }
};

template <typename G>
__device__ void load_grads(const CudaSlot& slot, int64_t at, int count, bool whole, float* values) {
  const auto pack = load(static_cast<const G*>(slot.grad) + at, count, whole);
#pragma unroll
  for (int e = 0; e < kEach; ++e) values[e] = to_float(pack.at[e]);
}

// The branch goes the same way for a whole block.
__device__ void load_grads(const CudaSlot& slot, int64_t at, int count, bool whole, float* values) {
  const DType type = slot.kind.grad;
  if (type == DType::kF32) return load_grads<float>(slot, at, count, whole, values);
  if (type == DType::kF16) return load_grads<f16>(slot, at, count, whole, values);
  load_grads<bf16>(slot, at, count, whole, values);
}

__device__ void clear_grads(const CudaSlot& slot, int64_t at, int count) {
  const size_t size = slot.kind.grad == DType::kF32 ? 4 : 2;
  auto* const grad = static_cast<uint16_t*>(slot.grad) + at * static_cast<int64_t>(size / 2);
  for (size_t i = 0; i < static_cast<size_t>(count) * (size / 2); ++i) grad[i] = 0;
}

// The random bits of a thread's elements, see dither_word().
__device__ void fill_random(const CudaNumbers& numbers, int64_t at, uint32_t* random) {
  const bool low = at >> 32 == 0;
  const uint32_t key =
      low ? numbers.random_key : random_key_at(numbers.random_base, static_cast<uint64_t>(at));
  const uint32_t hash = dither_hash(static_cast<uint32_t>(at), key);
#pragma unroll
  for (int e = 0; e < kEach; ++e) random[e] = hash * dither_factor(e);
}

template <Rule kRule, typename W, StateFormat kFormat>
__device__ void update_elements(const CudaSlot& slot, const CudaNumbers& numbers, float multiplier,
                                int64_t at, int count, const ApplyJob& job) {
  constexpr size_t kStates = state_buffers(kRule);
  constexpr bool kByte = kFormat == StateFormat::kByte;
  using First = std::conditional_t<kByte, ByteMoments<FirstMoment>, HalfMoments<FirstMoment>>;
  using Second = std::conditional_t<kByte, ByteMoments<SecondMoment>, HalfMoments<SecondMoment>>;
  const Weights<W, kFormat> weights(slot, at);
  const First first(slot.state, 0, at);
  const Second second(slot.state, 1, at);
  const bool whole = count == kEach && aligned_16(slot.grad) && aligned_16(slot.weight) &&
                     aligned_16(slot.state.master);
  float g[kEach], w[kEach], m[kEach], v[kEach];
  load_grads(slot, at, count, whole, g);
  weights.load(count, whole, w);
  if constexpr (kStates > 0) first.load(count, whole, m);
  if constexpr (kStates > 1) second.load(count, whole, v);
  uint32_t random[kEach];
  fill_random(numbers, at, random);
  const RuleNumbers n = numbers.rule;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    w[e] = updated<kRule>(n, g[e] * multiplier, w[e], &m[e], &v[e]);
  }
  weights.store(w, random, count, whole);
  if constexpr (kStates > 0) first.store(m, random, count, whole);
  if constexpr (kStates > 1) second.store(v, random, count, whole);
  if (job.clear_grads) clear_grads(slot, at, count);
}

// As step_kernel() of cuda.cu. All threads of a block get to the end, for the shuffles.
template <Rule kRule, typename W, StateFormat kFormat>
__global__ void __launch_bounds__(kStepThreads, kResident)
    compact_kernel(CudaTables tables, int64_t last_piece, ApplyJob job, bool clear_skipped) {
  const int64_t piece = last_piece - static_cast<int64_t>(blockIdx.x);
  const uint32_t index = tables.slot_of[piece];
  const CudaSlot& slot = tables.slots[index];
  const int64_t at = (piece - slot.first_piece) * kPiece + static_cast<int>(threadIdx.x) * kEach;
  const auto left = slot.count - at;
  const int count = static_cast<int>(left < 0 ? 0 : left < kEach ? left : kEach);
  wait_for_kernel_before();
  const DeviceVerdict verdict = *tables.verdict;
  if (verdict.apply) {
    update_elements<kRule, W, kFormat>(slot, tables.numbers[index], verdict.multiplier, at, count,
                                       job);
  } else if (clear_skipped) {
    clear_grads(slot, at, count);
  }
}

struct PickCompactKernel {
  template <Rule kRule, typename W, StateFormat kFormat>
  StepKernel operator()() const {
    return compact_kernel<kRule, W, kFormat>;
  }
};

}  // namespace

StepKernel compact_step_kernel(const KernelKind& kind) {
  return select_compact_kernel(kind, PickCompactKernel());
}

}  // namespace headroom::internal
