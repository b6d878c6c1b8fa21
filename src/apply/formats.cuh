// The formats of formats.h for CUDA kernels: the same bits as the scalar reference, for the eight
// elements that a thread updates at a time.
#ifndef HEADROOM_SRC_APPLY_FORMATS_CUH_
#define HEADROOM_SRC_APPLY_FORMATS_CUH_

#include "apply/cuda.h"
#include "apply/formats.h"
#include "core/cuda.cuh"

namespace headroom::internal {

constexpr int kEach = 8;  // elements of a thread at a time; four threads share a group of moments

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

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_FORMATS_CUH_
