// The step kernels for compact formats of masters and moments, see formats.h. As in cuda.cu, a
// block updates one piece; a thread updates eight elements, and four threads share a group of
// moments.
//
// In the time of the 12 bytes of an element there is room for some 80 instructions. So everything
// is loaded before anything is used, bytes are converted in words, there is a kernel of its own for
// gradients of the type of the weight, and what is not whole takes a path of its own.
#include "apply/cuda.cuh"
#include "apply/formats.h"
#include "core/cuda.cuh"

namespace headroom::internal {
namespace {

// Tuned on an H200, see docs/performance.md: more blocks on a multiprocessor, larger pieces and
// loads of only one set of elements at a time are all slower.
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

// Bytes 1 and 3 of two words.
__device__ inline uint32_t odd_bytes(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7531); }

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

// `bits` where the mask is 1 and `others` elsewhere, in one instruction that the compiler does not
// find.
template <uint32_t kMask>
__device__ inline uint32_t merge(uint32_t bits, uint32_t others) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(result) : "r"(bits), "r"(others), "n"(kMask));
  return result;
}
__device__ inline uint32_t with_sign(uint32_t bits, uint32_t sign) {
  return merge<kMagnitude>(bits, sign);
}

// The larger of a magnitude and that of `b`, or NaN if one is.
__device__ inline float larger_magnitude(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
#else
  return bits_float(larger(float_bits(a), float_bits(b) & kMagnitude));
#endif
}

// HalfRange::place() without the dither, and unplace(): the exponents differ by 112, and numbers
// below 2^-14 become subnormal ones, which cost nothing on a GPU. The sign stays.
__device__ inline uint32_t place_half_range(float x) { return float_bits(x * 0x1p-112f); }
__device__ inline float unplace_half_range(uint32_t placed) {
  return bits_float(placed) * 0x1p112f;
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

  // The largest magnitude, or NaN if there is one.
  __device__ static float largest_of(const float* values) {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < kEach; ++e) largest = larger_magnitude(largest, values[e]);
    return largest;
  }

  // As moment_magnitude(), for values that are not ordinary.
  __device__ static void limit(float* values, float* largest) {
    constexpr float kLimit = 0x1p126f;
    *largest = fminf(*largest, kLimit);
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      values[e] = copysignf(fminf(fabsf(values[e]), kLimit), values[e]);
  }

  template <bool kWhole>
  __device__ void store(const float* values, float largest, uint32_t hash, int count) {
    const uint32_t shared = Code::exponent(largest_of_group(float_bits(largest)));
    uint32_t placed[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) placed[e] = place(values[e], shared, hash * dither_factor(e));
#pragma unroll
    for (int e = 0; e < kEach; e += 4) {
      const uint32_t lower = codes_of(upper_halves(placed + e));
      const uint32_t upper = codes_of(upper_halves(placed + e + 2));
      set_word(&loaded, e / 4, odd_bytes(lower, upper));
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

  // The code, from bit 20 on, with a first moment's sign in bit 31; other bits are not part of it.
  __device__ static uint32_t place(float value, uint32_t exponent, uint32_t random) {
    if constexpr (kFirst) {
      const float scaled = value * bits_float((254 - exponent) << 23);
      return place_half_range(scaled) + dither_of<kMomentBits>(random);
    } else {
      const uint32_t rounded = float_bits(value) + dither_of<kMomentBits>(random);
      return larger(rounded - Code::first_bits(exponent), 0);
    }
  }

  // The codes of two placed values, from their upper halves, in the odd bytes.
  __device__ static uint32_t codes_of(uint32_t halves) {
    const uint32_t codes = halves << 4;
    return kFirst ? merge<0x7FFF7FFFu>(codes, halves) : codes;
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

  __device__ static float largest_of(const float* /*values*/) { return 0.0f; }
  __device__ static void limit(float* /*values*/, float* /*largest*/) {}

  template <bool kWhole>
  __device__ void store(const float* values, float /*largest*/, uint32_t hash, int count) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t dither = dither_of<kHalfMomentBits>(hash * dither_factor(e));
      loaded.at[e] = encode_moment(values[e], dither);
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
      values[e] = join(upper_half(upper, e), below);
    }
  }

  template <bool kWhole>
  __device__ void store(const float* values, uint32_t hash, int count) {
    uint32_t bits[kEach], rounded[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      bits[e] = aligned(values[e], dither_of<Split::kDropped>(hash * dither_factor(e)));
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
  // As in Split, with fewer instructions.
  __device__ static float join(uint32_t weight, uint32_t below) {
    if constexpr (Split::kHalf && kBits == 8) {
      const uint32_t whole = larger((weight & kMagnitude) + below, 0);
      return bits_float(with_sign(float_bits(unplace_half_range(whole >> 3)), weight));
    } else {
      return Split::join(weight, below);
    }
  }
  // NaN that arithmetic makes has no sign.
  __device__ static uint32_t aligned(float master, uint32_t dither) {
    if constexpr (Split::kHalf) {
      const float magnitude = fminf(fabsf(master), Split::kHalfInf);
      if constexpr (kBits == 8) return (place_half_range(magnitude) + dither) * 8;
      return Split::aligned_half(magnitude, dither);
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

// Gradients of a thread.
template <typename G>
struct Grads {
  Pack<G, kEach> loaded;

  template <bool kWhole>
  __device__ void load(const CudaSlot& slot, int64_t at, int count) {
    loaded = load_elements<kWhole>(static_cast<const G*>(slot.grad) + at, count);
  }

  __device__ void decode(float* values) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if constexpr (std::is_same_v<G, bf16>) {
        values[e] = bits_float(upper_half(loaded, e));
      } else {
        values[e] = to_float(loaded.at[e]);
      }
    }
  }
};

// Of any type. The branches go the same way for a whole block.
template <>
struct Grads<void> {
  DType type;
  Grads<float> of_f32;
  Grads<f16> of_f16;
  Grads<bf16> of_bf16;

  template <bool kWhole>
  __device__ void load(const CudaSlot& slot, int64_t at, int count) {
    type = slot.kind.grad;
    if (type == DType::kF32) return of_f32.load<kWhole>(slot, at, count);
    if (type == DType::kF16) return of_f16.load<kWhole>(slot, at, count);
    of_bf16.load<kWhole>(slot, at, count);
  }

  __device__ void decode(float* values) const {
    if (type == DType::kF32) return of_f32.decode(values);
    if (type == DType::kF16) return of_f16.decode(values);
    of_bf16.decode(values);
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
template <Rule kRule, typename G, typename W, StateFormat kFormat, bool kWhole>
struct Elements {
  static constexpr size_t kStates = state_buffers(kRule);
  static constexpr bool kByte = kFormat == StateFormat::kByte;
  std::conditional_t<kByte, ByteMoments<FirstMoment>, HalfMoments<FirstMoment>> first;
  std::conditional_t<kByte, ByteMoments<SecondMoment>, HalfMoments<SecondMoment>> second;
  Weights<W, kFormat> weights;
  Grads<G> grads;
  int64_t at;
  int count;

  __device__ void load(const CudaSlot& slot, int64_t index) {
    at = index;
    const int64_t left = slot.count - index;
    count = kWhole ? kEach : static_cast<int>(left < 0 ? 0 : left < kEach ? left : kEach);
    grads.template load<kWhole>(slot, at, count);
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
    for (int e = 0; e < kEach; ++e) g[e] *= multiplier;
    if (n.l2 != 0.0f) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) g[e] += n.l2 * w[e];
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) w[e] = updated<kRule, true>(n, g[e], w[e], &m[e], &v[e]);
    weights.template store<kWhole>(w, hash, count);
    float largest_m = 0.0f, largest_v = 0.0f;
    if constexpr (kStates > 0) largest_m = first.largest_of(m);
    if constexpr (kStates > 1) largest_v = second.largest_of(v);
    if (larger(float_bits(largest_m), float_bits(largest_v)) > kLargestMoment) {
      if constexpr (kStates > 0) first.limit(m, &largest_m);
      if constexpr (kStates > 1) second.limit(v, &largest_v);
    }
    if constexpr (kStates > 0) first.template store<kWhole>(m, largest_m, hash, count);
    if constexpr (kStates > 1) second.template store<kWhole>(v, largest_v, hash, count);
  }
};

// The piece from element `begin` on, if the step is applied. A thread loads its next elements
// before it updates those that it has, and the first ones before it knows the verdict.
template <Rule kRule, typename G, typename W, StateFormat kFormat, bool kWhole>
__device__ void update_piece(const CudaTables& tables, uint32_t index, int64_t begin) {
  constexpr int kRound = kCompactThreads * kEach;  // elements of the block
  constexpr int kRounds = kPiece / kRound;
  const CudaSlot& slot = tables.slots[index];
  const CudaNumbers& numbers = tables.numbers[index];
  const int64_t at = begin + static_cast<int>(threadIdx.x) * kEach;
  if constexpr (kWhole) {
    Elements<kRule, G, W, kFormat, true> elements[kRounds];
    elements[0].load(slot, at);
    const DeviceVerdict verdict = *tables.verdict;
    if (!verdict.apply) return;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i + 1 < kRounds) elements[i + 1].load(slot, at + (i + 1) * kRound);
      elements[i].update(numbers, verdict.multiplier);
    }
  } else {
    const DeviceVerdict verdict = *tables.verdict;
#pragma unroll 1
    for (int i = 0; i < kRounds && verdict.apply; ++i) {
      Elements<kRule, G, W, kFormat, false> elements;
      elements.load(slot, at + i * kRound);
      elements.update(numbers, verdict.multiplier);
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
template <Rule kRule, typename G, typename W, StateFormat kFormat>
__global__ void __launch_bounds__(kCompactThreads, kResident)
    compact_kernel(CudaTables tables, int64_t last_piece, ApplyJob job, bool clear_skipped) {
  const int64_t piece = last_piece - static_cast<int64_t>(blockIdx.x);
  const uint32_t index = tables.slot_of[piece];
  const CudaSlot& slot = tables.slots[index];
  const int64_t begin = (piece - slot.first_piece) * kPiece;
  const bool whole = slot.count - begin >= kPiece && aligned_16(slot.grad) &&
                     aligned_16(slot.weight) && aligned_16(slot.state.master);
  wait_for_kernel_before();
  if (whole) {
    update_piece<kRule, G, W, kFormat, true>(tables, index, begin);
  } else {
    update_piece<kRule, G, W, kFormat, false>(tables, index, begin);
  }
  const DeviceVerdict verdict = *tables.verdict;
  if (verdict.apply ? job.clear_grads : clear_skipped) {
    __syncthreads();
    clear_piece(slot, begin);
  }
}

// For select_compact_kernel(); nvcc warns about a lambda. `own`: gradients have the type of
// weights.
struct PickCompactKernel {
  bool own;
  template <Rule kRule, typename W, StateFormat kFormat>
  StepKernel operator()() const {
    return own ? compact_kernel<kRule, W, W, kFormat> : compact_kernel<kRule, void, W, kFormat>;
  }
};

}  // namespace

StepKernel compact_step_kernel(const KernelKind& kind) {
  const DType weight = kind.weight == WeightKind::kF16Master    ? DType::kF16
                       : kind.weight == WeightKind::kBF16Master ? DType::kBF16
                                                                : DType::kF32;
  return select_compact_kernel(kind, PickCompactKernel{kind.grad == weight});
}

}  // namespace headroom::internal
