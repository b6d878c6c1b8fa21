// The step kernels for compact formats of masters and moments, see formats.h. As in cuda.cu, a
// block updates one piece; a thread updates eight elements, and four threads share a group of
// moments.
//
// Arithmetic bounds these kernels as much as memory does: in the time of the 12 bytes of an element
// there is room for some 80 instructions. So everything is loaded before anything is used, bytes
// are converted in words, and only what is not whole takes a path of its own.
#include "apply/cuda.cuh"
#include "apply/formats.h"
#include "core/cuda.cuh"

namespace headroom::internal {
namespace {

// Tuned on an H200: of 4 to 9 blocks of 128 threads on a multiprocessor, and 3 to 5 of 256 threads
// that update only one set of elements each, this is the fastest by 10 % or more.
constexpr int kEach = 8;      // elements of a thread at a time
constexpr int kResident = 6;  // blocks on a multiprocessor; limits registers
static_assert(kPiece % (kCompactThreads * kEach) == 0);

// The elements of a thread in one array. kWhole: all of them exist and are aligned; otherwise those
// from `count` on are 0.
template <bool kWhole, typename T>
__device__ Pack<T, kEach> load_elements(const T* from, int count) {
  if constexpr (kWhole) {
    return load_pack<kEach>(from);
  } else {
    Pack<T, kEach> pack{};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (e < count) pack.at[e] = from[e];
    }
    return pack;
  }
}

template <bool kWhole, typename T>
__device__ void store_elements(T* to, const Pack<T, kEach>& pack, int count) {
  if constexpr (kWhole) {
    store_pack(to, pack);
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (e < count) to[e] = pack.at[e];
    }
  }
}

template <typename P>
__device__ inline uint32_t word_of(const P& pack, int i) {
  return reinterpret_cast<const uint32_t*>(&pack)[i];
}
template <typename P>
__device__ inline void set_word(P* pack, int i, uint32_t word) {
  reinterpret_cast<uint32_t*>(pack)[i] = word;
}

// Byte kByte of four words.
template <int kByte>
__device__ inline uint32_t bytes_of(const uint32_t* words) {
  constexpr unsigned kPair = kByte | (kByte + 4) << 4;
  return __byte_perm(__byte_perm(words[0], words[1], kPair), __byte_perm(words[2], words[3], kPair),
                     0x5410);
}

// Byte i of a word, signed, times 256. (__byte_perm() cannot extend a sign.)
__device__ inline uint32_t signed_byte(uint32_t word, unsigned i) {
  const unsigned sign = i | 8;
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;"
      : "=r"(result)
      : "r"(word), "r"(0x4 | i << 4 | sign << 8 | sign << 12));
  return result;
}

// The lower or upper halves of two words.
__device__ inline uint32_t lower_halves(const uint32_t* words) {
  return __byte_perm(words[0], words[1], 0x5410);
}
__device__ inline uint32_t upper_halves(const uint32_t* words) {
  return __byte_perm(words[0], words[1], 0x7632);
}

// Bits with the sign of others, in one instruction that the compiler does not find.
__device__ inline uint32_t with_sign(uint32_t bits, uint32_t sign) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, 0x7FFFFFFF, 0xE4;" : "=r"(result) : "r"(bits), "r"(sign));
  return result;
}

// moment_magnitude() in one instruction, which takes NaN for the limit as well.
__device__ inline float limited(float moment) {
  return fminf(fabsf(moment), bits_float(kLargestMoment));
}

// 16-bit number i of a pack, in the upper half of the result.
template <typename P>
__device__ inline uint32_t upper_half(const P& pack, int i) {
  const uint32_t word = word_of(pack, i / 2);
  return i % 2 == 0 ? word << 16 : word & 0xFFFF0000u;
}

// The largest of the four threads of a group.
__device__ inline uint32_t largest_of_group(uint32_t mine) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  mine = larger(mine, __shfl_xor_sync(kAll, mine, 1));
  return larger(mine, __shfl_xor_sync(kAll, mine, 2));
}

// First or second moments of a thread, in bytes.
template <typename Code>
struct ByteMoments {
  static constexpr bool kFirst = std::is_same_v<Code, FirstMoment>;
  uint8_t* codes;
  uint8_t* exponents;
  Pack<uint8_t, kEach> loaded;
  uint32_t exponent;

  template <bool kWhole>
  __device__ void load(const StateArrays& arrays, int64_t at, int count) {
    constexpr int kMoment = kFirst ? 0 : 1;
    codes = static_cast<uint8_t*>(arrays.moments[kMoment]) + at;
    exponents = arrays.exponents[kMoment] + at / kGroupSize;
    loaded = load_elements<kWhole>(codes, count);
    exponent = kWhole || count > 0 ? *exponents : 0;
  }

  template <bool kWhole>
  __device__ void decode(int count, float* values) const {
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) decode_word(word_of(loaded, i), values + 4 * i);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {  // a code of 0 is not always 0
      if (!kWhole && e >= count) values[e] = 0.0f;
    }
  }

  template <bool kWhole>
  __device__ void store(const float* values, uint32_t hash, int count) {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < kEach; ++e) largest = fmaxf(largest, limited(values[e]));
    const uint32_t shared = Code::exponent(largest_of_group(float_bits(largest)));
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        words[e] = encode(values[4 * i + e], shared, hash * dither_factor(4 * i + e));
      }
      set_word(&loaded, i, bytes_of<3>(words));
    }
    store_elements<kWhole>(codes, loaded, count);
    if ((kWhole || count > 0) && threadIdx.x % 4 == 0) *exponents = static_cast<uint8_t>(shared);
  }

 private:
  __device__ void decode_word(uint32_t word, float* values) const {
    if constexpr (kFirst) {  // the bits of f16, but for the place of the sign
      const float factor = bits_float(exponent << 23);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t upper = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
        const uint32_t bits = (upper & 0x80008000u) | (upper >> 1 & 0x3F803F80u);
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&bits));
        values[2 * i] = pair.x * factor;
        values[2 * i + 1] = pair.y * factor;
      }
    } else {
      const uint32_t first = Code::first_bits(exponent);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t code = __byte_perm(word, 0, 0x4044u | static_cast<unsigned>(i) << 8);
        values[i] = bits_float(code * 16 + first);  // from bit 16 to bit 20
      }
    }
  }

  // The code in the upper byte.
  __device__ static uint32_t encode(float value, uint32_t exponent, uint32_t random) {
    if constexpr (kFirst) {
      const float scaled = limited(value) * bits_float((254 - exponent) << 23);
      const uint32_t code = Code::Range::place(scaled, first_dither(random));
      return with_sign(code * 16, float_bits(value));
    } else {
      const uint32_t bits = float_bits(limited(value));
      return larger(bits + second_dither(random) - Code::first_bits(exponent), 0) * 16;
    }
  }
};

// Moments in bf16.
template <typename Code>
struct HalfMoments {
  static constexpr bool kFirst = std::is_same_v<Code, FirstMoment>;
  bf16* stored;
  Pack<bf16, kEach> loaded;

  template <bool kWhole>
  __device__ void load(const StateArrays& arrays, int64_t at, int count) {
    stored = static_cast<bf16*>(arrays.moments[kFirst ? 0 : 1]) + at;
    loaded = load_elements<kWhole>(stored, count);
  }

  template <bool kWhole>
  __device__ void decode(int /*count*/, float* values) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = bits_float(upper_half(loaded, e));
  }

  template <bool kWhole>
  __device__ void store(const float* values, uint32_t hash, int count) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t random = hash * dither_factor(e);
      const uint32_t dither = kFirst ? first_dither(random) : second_dither(random);
      loaded.at[e] = encode_moment(values[e], half_dither(dither));
    }
    store_elements<kWhole>(stored, loaded, count);
  }
};

// 16-bit weights of a thread and what is below them.
template <typename W, StateFormat kFormat>
struct Weights {
  static constexpr int kBits = kFormat == StateFormat::kByte ? 8 : 16;
  using Split = SplitMaster<W, kBits>;
  using Remainder = typename Split::Remainder;
  W* weights;
  Remainder* remainders;
  Pack<W, kEach> upper;
  Pack<Remainder, kEach> lower;

  template <bool kWhole>
  __device__ void load(const CudaSlot& slot, int64_t at, int count) {
    weights = static_cast<W*>(slot.weight) + at;
    remainders = static_cast<Remainder*>(slot.state.master) + at;
    upper = load_elements<kWhole>(weights, count);
    lower = load_elements<kWhole>(remainders, count);
  }

  __device__ void decode(float* values) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      uint32_t below;
      if constexpr (kBits == 8) {
        below = signed_byte(word_of(lower, e / 4), static_cast<unsigned>(e % 4));
      } else {
        below = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(lower.at[e])));
      }
      values[e] = Split::join(upper_half(upper, e), below);
    }
  }

  template <bool kWhole>
  __device__ void store(const float* values, uint32_t hash, int count) {
    uint32_t bits[kEach], rounded[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      bits[e] = aligned(values[e], master_dither<Split::kDropped>(hash * dither_factor(e)));
      rounded[e] = bits[e] + Split::kHalfUnit;
      if constexpr (Split::kHalf) rounded[e] = with_sign(rounded[e], float_bits(values[e]));
    }
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      set_word(&upper, i, upper_halves(rounded + 2 * i));
      if constexpr (kBits == 16) set_word(&lower, i, lower_halves(bits + 2 * i));
    }
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
      if constexpr (kBits == 8) set_word(&lower, i, bytes_of<1>(bits + 4 * i));
    }
    store_elements<kWhole>(weights, upper, count);
    store_elements<kWhole>(remainders, lower, count);
  }

 private:
  // Split::aligned(), with fewer instructions. NaN that arithmetic makes has no sign.
  __device__ static uint32_t aligned(float master, uint32_t dither) {
    if constexpr (Split::kHalf) {
      return Split::aligned_half(fminf(fabsf(master), Split::kHalfInf), dither);
    } else {
      return smaller(float_bits(master), Split::kQuietNan) + dither;
    }
  }
};

template <StateFormat kFormat>
struct Weights<float, kFormat> {
  float* weights;
  Pack<float, kEach> loaded;

  template <bool kWhole>
  __device__ void load(const CudaSlot& slot, int64_t at, int count) {
    weights = static_cast<float*>(slot.state.master) + at;
    loaded = load_elements<kWhole>(weights, count);
  }
  __device__ void decode(float* values) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = loaded.at[e];
  }
  template <bool kWhole>
  __device__ void store(const float* values, uint32_t /*hash*/, int count) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) loaded.at[e] = values[e];
    store_elements<kWhole>(weights, loaded, count);
  }
};

// Gradients of a thread, of any type. The branches go the same way for a whole block.
struct Grads {
  DType type;
  Pack<float, kEach> wide;
  Pack<uint16_t, kEach> narrow;

  template <bool kWhole>
  __device__ void load(const CudaSlot& slot, int64_t at, int count) {
    type = slot.kind.grad;
    if (type == DType::kF32) {
      wide = load_elements<kWhole>(static_cast<const float*>(slot.grad) + at, count);
    } else {
      narrow = load_elements<kWhole>(static_cast<const uint16_t*>(slot.grad) + at, count);
    }
  }

  __device__ void decode(float* values) const {
    if (type == DType::kF32) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) values[e] = wide.at[e];
    } else if (type == DType::kBF16) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) values[e] = bits_float(upper_half(narrow, e));
    } else {
#pragma unroll
      for (int e = 0; e < kEach; ++e) values[e] = to_float(f16::from_bits(narrow.at[e]));
    }
  }
};

// The hash of a thread's elements, see dither_word().
__device__ inline uint32_t hash_of(const CudaNumbers& numbers, int64_t at) {
  const bool low = at >> 32 == 0;
  const uint32_t key =
      low ? numbers.random_key : random_key_at(numbers.random_base, static_cast<uint64_t>(at));
  return dither_hash(static_cast<uint32_t>(at), key);
}

// Everything of kEach elements of a thread.
template <Rule kRule, typename W, StateFormat kFormat, bool kWhole>
struct Elements {
  static constexpr size_t kStates = state_buffers(kRule);
  static constexpr bool kByte = kFormat == StateFormat::kByte;
  std::conditional_t<kByte, ByteMoments<FirstMoment>, HalfMoments<FirstMoment>> first;
  std::conditional_t<kByte, ByteMoments<SecondMoment>, HalfMoments<SecondMoment>> second;
  Weights<W, kFormat> weights;
  Grads grads;
  int64_t at;
  int count;

  __device__ void load(const CudaSlot& slot, int64_t index) {
    at = index;
    const int64_t left = slot.count - index;
    count = kWhole ? kEach : static_cast<int>(left < 0 ? 0 : left < kEach ? left : kEach);
    grads.load<kWhole>(slot, at, count);
    weights.template load<kWhole>(slot, at, count);
    if constexpr (kStates > 0) first.template load<kWhole>(slot.state, at, count);
    if constexpr (kStates > 1) second.template load<kWhole>(slot.state, at, count);
  }

  __device__ void update(const CudaNumbers& numbers, float multiplier) {
    const uint32_t hash = hash_of(numbers, at);
    const RuleNumbers n = numbers.rule;
    float g[kEach], w[kEach], m[kEach], v[kEach];
    grads.decode(g);
    weights.decode(w);
    if constexpr (kStates > 0) first.template decode<kWhole>(count, m);
    if constexpr (kStates > 1) second.template decode<kWhole>(count, v);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      w[e] = updated<kRule, true>(n, g[e] * multiplier, w[e], &m[e], &v[e]);
    }
    weights.template store<kWhole>(w, hash, count);
    if constexpr (kStates > 0) first.template store<kWhole>(m, hash, count);
    if constexpr (kStates > 1) second.template store<kWhole>(v, hash, count);
  }
};

// The piece from element `begin` on. A thread loads its next elements before it updates those that
// it has.
template <Rule kRule, typename W, StateFormat kFormat, bool kWhole>
__device__ void update_piece(const CudaSlot& slot, const CudaNumbers& numbers, float multiplier,
                             int64_t begin) {
  constexpr int kRound = kCompactThreads * kEach;  // elements of the block
  constexpr int kRounds = kPiece / kRound;
  const int64_t at = begin + static_cast<int>(threadIdx.x) * kEach;
  if constexpr (kWhole) {
    Elements<kRule, W, kFormat, true> elements[kRounds];
    elements[0].load(slot, at);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i + 1 < kRounds) elements[i + 1].load(slot, at + (i + 1) * kRound);
      elements[i].update(numbers, multiplier);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
      Elements<kRule, W, kFormat, false> elements;
      elements.load(slot, at + i * kRound);
      elements.update(numbers, multiplier);
    }
  }
}

__device__ void clear_piece(const CudaSlot& slot, int64_t begin) {
  const int halves = slot.kind.grad == DType::kF32 ? 2 : 1;
  const int64_t left = slot.count - begin;
  const int64_t count = (left < kPiece ? left : kPiece) * halves;
  auto* const grad = static_cast<uint16_t*>(slot.grad) + begin * halves;
  for (int64_t i = threadIdx.x; i < count; i += kCompactThreads) grad[i] = 0;
}

// As step_kernel() of cuda.cu. All threads of a block get to the end, for the shuffles.
template <Rule kRule, typename W, StateFormat kFormat>
__global__ void __launch_bounds__(kCompactThreads, kResident)
    compact_kernel(CudaTables tables, int64_t last_piece, ApplyJob job, bool clear_skipped) {
  const int64_t piece = last_piece - static_cast<int64_t>(blockIdx.x);
  const uint32_t index = tables.slot_of[piece];
  const CudaSlot& slot = tables.slots[index];
  const int64_t begin = (piece - slot.first_piece) * kPiece;
  const bool whole = slot.count - begin >= kPiece && aligned_16(slot.grad) &&
                     aligned_16(slot.weight) && aligned_16(slot.state.master);
  wait_for_kernel_before();
  const DeviceVerdict verdict = *tables.verdict;
  if (verdict.apply) {
    const CudaNumbers& numbers = tables.numbers[index];
    if (whole) {
      update_piece<kRule, W, kFormat, true>(slot, numbers, verdict.multiplier, begin);
    } else {
      update_piece<kRule, W, kFormat, false>(slot, numbers, verdict.multiplier, begin);
    }
  }
  if (verdict.apply ? job.clear_grads : clear_skipped) {
    __syncthreads();
    clear_piece(slot, begin);
  }
}

struct PickCompactKernel {  // for select_compact_kernel(); nvcc warns about a lambda
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
