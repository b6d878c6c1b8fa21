// The update kernels of one SIMD target for compact formats of masters and moments
// (formats-inl.h). A block of elements is decoded to FP32, updated by the same arithmetic as any
// other, and encoded again, without leaving the L1 cache.
//
// Each of these steps is a loop of its own over the block. From the first load of an element to its
// last store there is a chain of some 200 cycles. The scheduler of a CPU cannot hold as many
// instructions as it could execute meanwhile: one loop for all steps, with everything in registers,
// took 1.25 to 1.6 times as long (Zen 5, AVX2 and AVX-512).
#if defined(HEADROOM_SRC_APPLY_COMPACT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_APPLY_COMPACT_INL_H_
#undef HEADROOM_SRC_APPLY_COMPACT_INL_H_
#else
#define HEADROOM_SRC_APPLY_COMPACT_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "apply/formats-inl.h"
#include "apply/kernels.h"
#include "apply/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

// A block in FP32. Larger blocks hide the beginning and the end of each loop, but have to fit into
// the L1 cache: these take 10 KiB.
constexpr size_t kBlockGroups = 16;
constexpr size_t kBlock = kBlockGroups * kGroup;
struct Block {
  HWY_ALIGN float weight[kBlock];
  HWY_ALIGN float moments[2][kBlock];
  HWY_ALIGN uint32_t random[kBlock];      // dither_word()
  HWY_ALIGN uint32_t hashes[kBlock / 8];  // dither_hash()
  HWY_ALIGN uint32_t largest[2][kBlockGroups];
};

// Prefetches the group that is kAhead elements further on. Each array is prefetched by the loop
// that uses it last: prefetching all of them in one loop would exceed the outstanding misses of a
// CPU.
template <typename T>
HWY_INLINE void prefetch_ahead(const T* group) {
  constexpr size_t kAhead = 512, kCacheLine = 64;
  const char* const from = reinterpret_cast<const char*>(group) + kAhead * sizeof(T);
  for (size_t i = 0; i < kGroup * sizeof(T); i += kCacheLine) hwy::Prefetch(from + i);
}

// The arrays of a span, as elements of a format. W is float for FP32 weights.
template <typename W, StateFormat kFormat>
struct CompactArrays {
  static constexpr bool kByte = kFormat == StateFormat::kByte;
  static constexpr int kBits = kByte ? 8 : 16;
  static constexpr bool kNarrow = !std::is_same_v<W, float>;
  using Narrow = std::conditional_t<kNarrow, W, f16>;  // for types that FP32 weights do not use
  using Master = std::conditional_t<kNarrow, typename SplitMaster<Narrow, kBits>::Remainder, float>;
  using Moment = std::conditional_t<kByte, uint8_t, bf16>;

  explicit CompactArrays(const ApplySpan& span)
      : master(static_cast<Master*>(span.state.master)),
        weight(static_cast<Narrow*>(span.weight)),
        state{static_cast<Moment*>(span.state.moments[0]),
              static_cast<Moment*>(span.state.moments[1])},
        exponents{span.state.exponents[0], span.state.exponents[1]} {}

  Master* HWY_RESTRICT master;
  Narrow* HWY_RESTRICT weight;
  Moment* HWY_RESTRICT state[2];
  uint8_t* HWY_RESTRICT exponents[2];
};

// Fills block.random with the dither_word() of each element. `index` is that of the first one, a
// multiple of 8: eight elements share a hash.
HWY_INLINE void fill_random(uint32_t index, uint32_t key, size_t count, Block& block) {
  const DF d;
  const hn::Rebind<uint32_t, DF> du;
  constexpr auto kFactors = [] {
    std::array<uint32_t, 16> factors{};
    for (uint32_t i = 0; i < 16; ++i) factors[i] = dither_factor(i % 8);
    return factors;
  }();
  for (size_t i = 0; i < count / 8; i += kFloatLanes) {
    hn::Store(random_words(d, index / 8 + static_cast<uint32_t>(i), key), du, block.hashes + i);
  }
  for (size_t j = 0; j < count; j += kFloatLanes) {
    auto hash = hn::Set(du, block.hashes[j / 8]);
    if constexpr (kFloatLanes > 8) {
      hash = hn::IfThenElse(hn::FirstN(du, 8), hash, hn::Set(du, block.hashes[j / 8 + 1]));
    }
    hn::Store(hn::Mul(hash, hn::LoadU(du, kFactors.data() + j % 8)), du, block.random + j);
  }
}

template <typename W, typename Remainder>
void encode_weights(const float* HWY_RESTRICT from, const uint32_t* HWY_RESTRICT random,
                    size_t count, W* HWY_RESTRICT weight, Remainder* HWY_RESTRICT master) {
  constexpr size_t kSize = sizeof(Remainder);
  const DF d;
  const hn::Rebind<uint32_t, DF> du;
  for (size_t j = 0; j < count; j += kGroup) {
    prefetch_ahead(weight + j);
    prefetch_ahead(master + j);
    BitsOf<DF> bits[kVectors], aligned[kVectors];
    HEADROOM_UNROLL
    for (size_t k = 0; k < kVectors; ++k) {
      const size_t at = j + k * kFloatLanes;
      Masters<DF, W, 8 * kSize>::split(d, hn::Load(d, from + at), hn::Load(du, random + at),
                                       bits[k], aligned[k]);
    }
    store_parts<2, 2>(d, bits, weight + j);
    store_parts<kSize, 2 - kSize>(d, aligned, master + j);
  }
}

// The largest magnitude of each group.
template <class Moments>
HWY_INLINE void find_largest(const float* HWY_RESTRICT values, size_t count,
                             uint32_t* HWY_RESTRICT largest) {
  const DF d;
  const auto magnitude = [&](size_t i)
                             HWY_ATTR { return Moments::magnitude(d, hn::Load(d, values + i)); };
  const auto in_lanes = [&](size_t i) HWY_ATTR {
    auto all = magnitude(i);
    HEADROOM_UNROLL
    for (size_t k = kFloatLanes; k < kGroup; k += kFloatLanes) all = hn::Max(all, magnitude(i + k));
    return all;
  };
#if HWY_TARGET == HWY_SCALAR
  for (size_t j = 0; j < count; j += kGroup) largest[j / kGroup] = hn::GetLane(in_lanes(j));
#else
  const hn::CappedTag<uint32_t, 4> d4;
  const auto in_four_lanes = [&](size_t i) HWY_ATTR {
    const auto all = in_lanes(std::min(i, count - kGroup));  // what is beyond `count` is not used
    if constexpr (kFloatLanes == 4) {
      return all;
    } else if constexpr (kFloatLanes == 8) {
      return hn::Max(hn::LowerHalf(d4, all), hn::UpperHalf(d4, all));
    } else {
      const hn::CappedTag<uint32_t, 8> d8;
      const auto half = hn::Max(hn::LowerHalf(d8, all), hn::UpperHalf(d8, all));
      return hn::Max(hn::LowerHalf(d4, half), hn::UpperHalf(d4, half));
    }
  };
  const auto merge = [&](auto a, auto b) HWY_ATTR {
    return hn::Max(hn::InterleaveLower(d4, a, b), hn::InterleaveUpper(d4, a, b));
  };
  // Four groups become the four lanes of a vector: fewer instructions than for each on its own.
  for (size_t j = 0; j < count; j += 4 * kGroup) {
    const auto even = merge(in_four_lanes(j), in_four_lanes(j + 2 * kGroup));
    const auto odd = merge(in_four_lanes(j + kGroup), in_four_lanes(j + 3 * kGroup));
    hn::Store(merge(even, odd), d4, largest + j / kGroup);
  }
#endif
}

// `largest`: see find_largest().
template <class Moments>
void encode_moments(const float* HWY_RESTRICT from, const uint32_t* HWY_RESTRICT largest,
                    const uint32_t* HWY_RESTRICT random, size_t count, uint8_t* HWY_RESTRICT codes,
                    uint8_t* HWY_RESTRICT exponents) {
  const DF d;
  const hn::Rebind<uint32_t, DF> du;
  for (size_t j = 0; j < count; j += kGroup) {
    prefetch_ahead(codes + j);
    const uint32_t limited = std::min(largest[j / kGroup], kLargestMoment);
    const uint32_t exponent = Moments::Code::exponent(limited);
    exponents[j / kGroup] = static_cast<uint8_t>(exponent);
    const auto encoder = Moments::encoder(exponent);
    BitsOf<DF> bits[kVectors];
    HEADROOM_UNROLL
    for (size_t k = 0; k < kVectors; ++k) {
      const size_t at = j + k * kFloatLanes;
      bits[k] = Moments::encode(d, hn::Load(d, from + at), encoder, hn::Load(du, random + at));
    }
    store_parts<1, 3>(d, bits, codes + j);
  }
}

// Moments of StateFormat::kHalf.
HWY_INLINE void encode_halves(const float* HWY_RESTRICT from, const uint32_t* HWY_RESTRICT random,
                              size_t count, bf16* HWY_RESTRICT to) {
  const DF d;
  const hn::Rebind<uint32_t, DF> du;
  for (size_t j = 0; j < count; j += kGroup) {
    prefetch_ahead(to + j);
    BitsOf<DF> bits[kVectors];
    HEADROOM_UNROLL
    for (size_t k = 0; k < kVectors; ++k) {
      const size_t at = j + k * kFloatLanes;
      bits[k] = encode_half(d, hn::Load(d, from + at), hn::Load(du, random + at));
    }
    store_parts<2, 2>(d, bits, to + j);
  }
}

// Decodes what a rule needs, but for FP32 weights, which are updated in place. One loop: it is
// short, and the arrays do not depend on each other.
template <size_t kStates, typename W, StateFormat kFormat>
HWY_INLINE void decode_block(const CompactArrays<W, kFormat>& a, size_t i, size_t count,
                             Block& block) {
  using A = CompactArrays<W, kFormat>;
  const DF d;
  for (size_t j = 0; j < count; j += kGroup) {
    const size_t group = (i + j) / kGroup;
    const uint32_t e0 = A::kByte && kStates > 0 ? a.exponents[0][group] : 0;
    const uint32_t e1 = A::kByte && kStates > 1 ? a.exponents[1][group] : 0;
    const auto first = FirstMoments::decoder(e0);
    const auto second = SecondMoments::decoder(e1);
    HEADROOM_UNROLL
    for (size_t k = j; k < j + kGroup; k += kFloatLanes) {
      if constexpr (A::kNarrow) {
        using Split = Masters<DF, W, A::kBits>;
        hn::Store(Split::join(d, a.weight + i + k, a.master + i + k), d, block.weight + k);
      }
      if constexpr (!A::kByte) {
        for (size_t b = 0; b < kStates; ++b) {
          hn::Store(load_float(d, a.state[b] + i + k), d, block.moments[b] + k);
        }
      } else {
        if constexpr (kStates > 0) {
          hn::Store(FirstMoments::decode(d, a.state[0] + i + k, first), d, block.moments[0] + k);
        }
        if constexpr (kStates > 1) {
          hn::Store(SecondMoments::decode(d, a.state[1] + i + k, second), d, block.moments[1] + k);
        }
      }
    }
  }
}

template <size_t kStates, typename W, StateFormat kFormat>
HWY_INLINE void encode_block(const CompactArrays<W, kFormat>& a, size_t i, size_t count,
                             Block& block) {
  using A = CompactArrays<W, kFormat>;
  const size_t group = i / kGroup;
  const uint32_t* const random = block.random;
  if constexpr (A::kNarrow) {
    encode_weights(block.weight, random, count, a.weight + i, a.master + i);
  }
  const auto largest = [&](size_t b) { return block.largest[b]; };
  const auto& moments = block.moments;
  if constexpr (A::kByte) {
    if constexpr (kStates > 0) find_largest<FirstMoments>(moments[0], count, largest(0));
    if constexpr (kStates > 1) find_largest<SecondMoments>(moments[1], count, largest(1));
    if constexpr (kStates > 0) {
      encode_moments<FirstMoments>(moments[0], largest(0), random, count, a.state[0] + i,
                                   a.exponents[0] + group);
    }
    if constexpr (kStates > 1) {
      encode_moments<SecondMoments>(moments[1], largest(1), random, count, a.state[1] + i,
                                    a.exponents[1] + group);
    }
  } else {
    if constexpr (kStates > 0) encode_halves(moments[0], random, count, a.state[0] + i);
    if constexpr (kStates > 1) encode_halves(moments[1], random, count, a.state[1] + i);
  }
}

// Applies the rule to decoded elements. kDecay: n.l2 is not 0.
template <Rule kRule, bool kInPlace, bool kDecay, typename G>
void update_block(const RuleNumbers& n, const G* HWY_RESTRICT grad, float* HWY_RESTRICT weight,
                  size_t count, Block& block) {
  const DF d;
  for (size_t j = 0; j < count; j += kGroup) {
    prefetch_ahead(grad + j);
    if constexpr (kInPlace) prefetch_ahead(weight + j);
    for (size_t k = j; k < j + kGroup; k += kFloatLanes) {
      const auto w = load_float(d, weight + k);
      auto g = hn::Mul(load_float(d, grad + k), hn::Set(d, n.multiplier));
      if constexpr (kDecay) g = hn::Add(g, hn::Mul(hn::Set(d, n.l2), w));
      auto* const s0 = block.moments[0] + k;
      auto* const s1 = block.moments[1] + k;
      store_float(d, updated<kRule, true>(d, n, g, w, s0, s1), weight + k);
    }
  }
}

// Updates a span of whole groups.
template <Rule kRule, typename W, StateFormat kFormat>
void update_groups(const ApplySpan& span, const ApplyJob job) {
  using A = CompactArrays<W, kFormat>;
  constexpr size_t kStates = state_buffers(kRule);
  const RuleNumbers n = *span.numbers;  // a copy, which cannot alias the stores below
  const A a(span);
  Block block;
  for (size_t i = 0; i < span.count; i += kBlock) {
    const size_t count = std::min(span.count - i, kBlock);
    fill_random(span.first_index + static_cast<uint32_t>(i), span.random_key, count, block);
    decode_block<kStates>(a, i, count, block);
    auto* const grad = static_cast<char*>(span.grad) + i * size_of(span.grad_type);
    with_type<f16, bf16, float>(span.grad_type, [&](auto element) HWY_ATTR {
      const auto* const from = reinterpret_cast<const decltype(element)*>(grad);
      float* weight;
      if constexpr (A::kNarrow) weight = block.weight;
      if constexpr (!A::kNarrow) weight = a.master + i;
      if (n.l2 != 0.0f) {
        update_block<kRule, !A::kNarrow, true>(n, from, weight, count, block);
      } else {
        update_block<kRule, !A::kNarrow, false>(n, from, weight, count, block);
      }
    });
    encode_block<kStates>(a, i, count, block);
    if (job.clear_grads) std::memset(grad, 0, count * size_of(span.grad_type));
  }
}

// Whole groups in place, then the last elements in padded copies.
template <Rule kRule, typename W, StateFormat kFormat>
void update_compact_span(const ApplySpan& span, const ApplyJob job) {
  using A = CompactArrays<W, kFormat>;
  constexpr size_t kStates = state_buffers(kRule);
  ApplySpan part = span;
  part.count = span.count / kGroup * kGroup;
  update_groups<kRule, W, kFormat>(part, job);
  const size_t whole = part.count, rest = span.count - whole;
  if (rest == 0) return;

  const A a(span);
  typename A::Master master[kGroup] = {};
  typename A::Narrow weight[kGroup] = {};
  typename A::Moment state[2][kGroup] = {};
  float grad[kGroup] = {};  // has room for every type
  const size_t grad_size = size_of(span.grad_type);
  auto* const grad_end = static_cast<char*>(span.grad) + whole * grad_size;
  const auto copy = [rest](void* to, const void* from, size_t size)
                        HWY_ATTR { std::memcpy(to, from, rest * size); };
  copy(master, a.master + whole, sizeof(master[0]));
  if (A::kNarrow) copy(weight, a.weight + whole, sizeof(weight[0]));
  for (size_t b = 0; b < kStates; ++b) copy(state[b], a.state[b] + whole, sizeof(state[b][0]));
  copy(grad, grad_end, grad_size);
  part.state.master = master, part.weight = weight, part.grad = grad, part.count = kGroup;
  part.first_index += static_cast<uint32_t>(whole);
  for (size_t b = 0; b < kStates; ++b) {
    part.state.moments[b] = state[b];
    if (A::kByte) part.state.exponents[b] += whole / kGroup;
  }
  update_groups<kRule, W, kFormat>(part, job);
  copy(a.master + whole, master, sizeof(master[0]));
  if (A::kNarrow) copy(a.weight + whole, weight, sizeof(weight[0]));
  for (size_t b = 0; b < kStates; ++b) copy(a.state[b] + whole, state[b], sizeof(state[b][0]));
  if (job.clear_grads) copy(grad_end, grad, grad_size);
}

template <Rule kRule, typename W, StateFormat kFormat>
void update_compact_spans(const ApplySpan* spans, size_t count, const ApplyJob& job) {
  for (size_t i = 0; i < count; ++i) update_compact_span<kRule, W, kFormat>(spans[i], job);
}

ApplyFunction compact_function_for_target(const KernelKind& kind) {
  return select_compact_kernel(kind, []<Rule kRule, typename W, StateFormat kFormat>() {
    return &update_compact_spans<kRule, W, kFormat>;
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_APPLY_COMPACT_INL_H_
