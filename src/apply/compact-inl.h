// The update kernels of one SIMD target for compact formats of masters and moments (formats.h has
// the scalar reference). A group of elements is decoded to FP32, updated by the same arithmetic as
// any other, and encoded again, without leaving the L1 cache.
#if defined(HEADROOM_SRC_APPLY_COMPACT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_APPLY_COMPACT_INL_H_
#undef HEADROOM_SRC_APPLY_COMPACT_INL_H_
#else
#define HEADROOM_SRC_APPLY_COMPACT_INL_H_
#endif

#include <hwy/cache_control.h>

#include <cstring>
#include <type_traits>

#include "apply/formats.h"
#include "apply/kernels.h"
#include "apply/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

constexpr size_t kGroup = static_cast<size_t>(kGroupSize);

template <class D>
using WordsOf = hn::Vec<hn::Rebind<int32_t, D>>;

// Bytes as unsigned or signed lanes.
template <typename T, class D>
HWY_INLINE hn::Vec<hn::Rebind<T, D>> load_bytes(D, const void* from) {
  using Byte = std::conditional_t<std::is_signed_v<T>, int8_t, uint8_t>;
  const hn::Rebind<Byte, D> d8;
  return hn::PromoteTo(hn::Rebind<T, D>(), hn::LoadU(d8, static_cast<const Byte*>(from)));
}

// The lanes have to be below 256.
template <class D>
HWY_INLINE void store_bytes(D, BitsOf<D> bits, void* to) {
  hn::StoreU(hn::U8FromU32(bits), hn::Rebind<uint8_t, D>(), static_cast<uint8_t*>(to));
}

// See SplitMaster.
template <class D, typename W, int kBits>
struct Masters {
  using Split = SplitMaster<W, kBits>;
  using Remainder = typename Split::Remainder;
  using DI = hn::Rebind<int32_t, D>;
  using DU = hn::Rebind<uint32_t, D>;

  static HWY_INLINE hn::Vec<D> join(D d, const W* weight, const Remainder* remainder) {
    const DI di;
    const DU du;
    const auto bits = hn::PromoteTo(du, load_halves(d, weight));
    const auto magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, 0x7FFFu)));
    WordsOf<D> below;
    if constexpr (kBits == 8) {
      below = load_bytes<int32_t>(d, remainder);
    } else {
      below = hn::PromoteTo(di, hn::LoadU(hn::Rebind<int16_t, D>(), remainder));
    }
    // Only a weight of 0 can have a sum below 0.
    const auto sum = hn::Add(hn::ShiftLeft<kBits>(magnitude), below);
    const auto whole = hn::BitCast(du, hn::Max(sum, hn::Zero(di)));
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
    if constexpr (!Split::kHalf) {
      return hn::BitCast(d, hn::Or(sign, hn::ShiftLeft<Split::kDropped>(whole)));
    } else {
      BitsOf<D> normal;
      if constexpr (Split::kDropped > 0) {
        normal = hn::ShiftLeft<Split::kDropped>(whole);
      } else {
        normal = hn::ShiftRight<-Split::kDropped>(whole);
      }
      normal = hn::Add(normal, hn::Set(du, Split::kBias));
      const auto subnormal = hn::BitCast(
          du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, whole)), hn::Set(d, Split::kUnit)));
      const auto is_normal = hn::Gt(hn::BitCast(di, whole),
                                    hn::Set(di, static_cast<int32_t>(Split::kNormal) - 1));
      const auto value = hn::IfThenElse(hn::RebindMask(du, is_normal), normal, subnormal);
      return hn::BitCast(d, hn::Or(sign, value));
    }
  }

  static HWY_INLINE void split(D d, hn::Vec<D> master, BitsOf<D> random, W* weight,
                               Remainder* remainder) {
    const DI di;
    const DU du;
    const auto limit = hn::Set(di, static_cast<int32_t>(Split::kInf));
    const auto magnitude = hn::BitCast(du, hn::Min(magnitude_bits(d, master), limit));
    BitsOf<D> whole;
    if constexpr (Split::kDropped > 0) {
      const auto dither = hn::And(hn::ShiftRight<16 - Split::kDropped>(random),
                                  hn::Set(du, Split::kRandomMask));
      if constexpr (Split::kHalf) {
        const auto normal = hn::ShiftRight<Split::kDropped>(
            hn::Add(hn::Sub(magnitude, hn::Set(du, Split::kBias)), dither));
        const auto moved =
            hn::Mul(hn::ConvertTo(d, hn::BitCast(di, dither)), hn::Set(d, 1.0f / 32.0f));
        whole = pick(d, magnitude, normal, moved);
      } else {
        whole = hn::ShiftRight<Split::kDropped>(hn::Add(magnitude, dither));
      }
    } else if constexpr (Split::kHalf) {
      const auto normal =
          hn::ShiftLeft<-Split::kDropped>(hn::Sub(magnitude, hn::Set(du, Split::kBias)));
      whole = pick(d, magnitude, normal, hn::Zero(d));
    } else {
      whole = magnitude;
    }
    const auto rounded = hn::ShiftRight<kBits>(hn::Add(whole, hn::Set(du, 1u << (kBits - 1))));
    const auto sign =
        hn::And(hn::ShiftRight<16>(hn::BitCast(du, master)), hn::Set(du, 0x8000u));
    store_halves(d, low_halves(d, hn::Or(sign, rounded)), weight);
    const auto below = hn::And(hn::Sub(whole, hn::ShiftLeft<kBits>(rounded)),
                               hn::Set(du, (1u << kBits) - 1));
    if constexpr (kBits == 8) {
      store_bytes(d, below, remainder);
    } else {
      store_halves(d, low_halves(d, below), remainder);
    }
  }

 private:
  // The integer of an f16 master: `normal`, or the value in units plus `dither` below 2^-14.
  static HWY_INLINE BitsOf<D> pick(D d, BitsOf<D> magnitude, BitsOf<D> normal,
                                   hn::Vec<D> dither) {
    const DI di;
    const DU du;
    const auto scaled = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 1.0f / Split::kUnit));
    const auto is_subnormal = hn::Gt(hn::Set(di, 0x38800000), hn::BitCast(di, magnitude));
    // Zero where it is not used: larger numbers have no integer.
    const auto units = hn::IfThenElseZero(hn::RebindMask(d, is_subnormal), scaled);
    const auto subnormal = hn::BitCast(du, hn::ConvertTo(di, hn::Add(units, dither)));
    return hn::IfThenElse(hn::RebindMask(du, is_subnormal), subnormal, normal);
  }
};

// See MomentCode.
template <int kExponentBits, class D>
HWY_INLINE hn::Vec<D> decode_moment(D d, const uint8_t* codes, uint32_t exponent) {
  using Code = MomentCode<kExponentBits>;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto code = load_bytes<uint32_t>(d, codes);
  const auto magnitude = Code::kSigned ? hn::And(code, hn::Set(du, 0x7Fu)) : code;
  const auto smallest = hn::Set(du, (exponent - Code::kBinades) << 23);
  const auto first = hn::Set(du, Code::kFirstNormal);
  const auto is_subnormal = hn::Gt(hn::BitCast(di, first), hn::BitCast(di, magnitude));
  const auto field = hn::Sub(magnitude, hn::IfThenZeroElse(hn::RebindMask(du, is_subnormal), first));
  const auto bits = hn::Add(smallest, hn::ShiftLeft<Code::kDropped>(field));
  const auto value =
      hn::Sub(hn::BitCast(d, bits),
              hn::IfThenElseZero(hn::RebindMask(d, is_subnormal), hn::BitCast(d, smallest)));
  if (!Code::kSigned) return value;
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du, 0x80u)));
  return hn::Or(value, hn::BitCast(d, sign));
}

template <int kExponentBits, class D>
HWY_INLINE WordsOf<D> code_magnitude(D d, hn::Vec<D> value) {
  const hn::Rebind<int32_t, D> di;
  const auto largest = hn::Set(di, static_cast<int32_t>(MomentCode<kExponentBits>::kLargest));
  return hn::Min(magnitude_bits(d, value), largest);
}

template <int kExponentBits, class D>
HWY_INLINE void encode_moment(D d, hn::Vec<D> value, uint32_t exponent, BitsOf<D> random,
                              uint8_t* codes) {
  using Code = MomentCode<kExponentBits>;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const uint32_t lowest = (exponent - Code::kBinades) << 23;
  const auto smallest = hn::Set(di, static_cast<int32_t>(lowest));
  const auto bits = code_magnitude<kExponentBits>(d, value);
  const auto is_subnormal = hn::Gt(smallest, bits);
  const auto sum = hn::Add(hn::BitCast(d, bits), hn::BitCast(d, smallest));
  const auto moved = hn::BitCast(du, hn::IfThenElse(is_subnormal, hn::BitCast(di, sum), bits));
  const auto kept = hn::ShiftRight<Code::kDropped>(
      hn::Add(moved, hn::ShiftLeft<Code::kDropped - 16>(random)));
  const auto first = hn::IfThenZeroElse(hn::RebindMask(du, is_subnormal),
                                        hn::Set(du, Code::kFirstNormal));
  auto code = hn::Add(hn::Sub(kept, hn::Set(du, lowest >> Code::kDropped)), first);
  if (Code::kSigned) {
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, value)), hn::Set(du, 0x80u));
    code = hn::Or(code, sign);
  } else {
    const auto at_least = hn::Min(bits, hn::Set(di, 1));  // 0 for 0
    code = hn::BitCast(du, hn::Max(hn::BitCast(di, code), at_least));
  }
  store_bytes(d, code, codes);
}

// Encodes a group, whose exponent follows from its largest element. `random`: random_word().
template <int kExponentBits>
HWY_INLINE void encode_group(const float* values, const uint32_t* random, uint8_t* codes,
                             uint8_t* exponent) {
  const DF d;
  const hn::Rebind<int32_t, DF> di;
  const hn::Rebind<uint32_t, DF> du;
  auto largest = hn::Zero(di);
  for (size_t j = 0; j < kGroup; j += kFloatLanes) {
    largest = hn::Max(largest, code_magnitude<kExponentBits>(d, hn::Load(d, values + j)));
  }
  const auto top = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
  const uint32_t shared = MomentCode<kExponentBits>::exponent(top);
  *exponent = static_cast<uint8_t>(shared);
  for (size_t j = 0; j < kGroup; j += kFloatLanes) {
    const auto word = hn::Load(du, random + j);
    const auto bits = MomentCode<kExponentBits>::kSigned ? hn::And(word, hn::Set(du, 0xFFFFu))
                                                         : hn::ShiftRight<16>(word);
    encode_moment<kExponentBits>(d, hn::Load(d, values + j), shared, bits, codes + j);
  }
}

// Moments in bf16.
template <class D>
HWY_INLINE void encode_moment(D d, hn::Vec<D> value, BitsOf<D> random, bf16* to) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto magnitude =
      hn::BitCast(du, hn::Min(magnitude_bits(d, value), hn::Set(di, 0x7F7F0000)));
  const auto kept = hn::ShiftRight<16>(hn::Add(magnitude, random));
  const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(du, value)), hn::Set(du, 0x8000u));
  store_halves(d, low_halves(d, hn::Or(sign, kept)), to);
}

// Gradients of any type. The branch goes the same way for a whole span.
template <class D>
HWY_INLINE hn::Vec<D> load_grad(D d, const void* grad, DType type, size_t i) {
  if (type == DType::kF32) return load_float(d, static_cast<const float*>(grad) + i);
  if (type == DType::kF16) return load_float(d, static_cast<const f16*>(grad) + i);
  return load_float(d, static_cast<const bf16*>(grad) + i);
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

  Master* HWY_RESTRICT master;
  Narrow* HWY_RESTRICT weight;
  void* HWY_RESTRICT grad;
  Moment* HWY_RESTRICT state[2];
  uint8_t* HWY_RESTRICT exponents[2];
  DType grad_type;
};

// Bytes ahead of the current group that are prefetched, of every array.
constexpr size_t kCompactAhead = 512;

// Updates the group from element i on. `index` is that of element i in its tensor.
template <Rule kRule, typename W, StateFormat kFormat>
HWY_INLINE void update_group(const RuleNumbers& n, const ApplyJob job,
                             const CompactArrays<W, kFormat>& a, size_t i, uint32_t index,
                             uint32_t key) {
  using A = CompactArrays<W, kFormat>;
  using Split = Masters<DF, typename A::Narrow, A::kBits>;
  constexpr size_t kStates = state_buffers(kRule);
  const DF d;
  const hn::Rebind<uint32_t, DF> du;
  HWY_ALIGN float s0[kGroup];
  HWY_ALIGN float s1[kGroup];
  HWY_ALIGN uint32_t random[kGroup];
  for (size_t j = 0; j < kGroup; j += kFloatLanes) {
    const size_t at = i + j;
    const auto word = random_words(d, index + static_cast<uint32_t>(j), key);
    if constexpr (A::kByte) {
      const size_t group = i / kGroup;
      hn::Store(word, du, random + j);
      if constexpr (kStates > 0) {
        hn::Store(decode_moment<4>(d, a.state[0] + at, a.exponents[0][group]), d, s0 + j);
      }
      if constexpr (kStates > 1) {
        hn::Store(decode_moment<5>(d, a.state[1] + at, a.exponents[1][group]), d, s1 + j);
      }
    } else {
      if constexpr (kStates > 0) hn::Store(load_float(d, a.state[0] + at), d, s0 + j);
      if constexpr (kStates > 1) hn::Store(load_float(d, a.state[1] + at), d, s1 + j);
    }
    const auto g = hn::Mul(load_grad(d, a.grad, a.grad_type, at), hn::Set(d, n.multiplier));
    if constexpr (A::kNarrow) {
      const auto w = Split::join(d, a.weight + at, a.master + at);
      Split::split(d, updated<kRule>(d, n, g, w, s0 + j, s1 + j), word, a.weight + at,
                   a.master + at);
    } else {
      const auto w = load_float(d, a.master + at);
      store_float(d, updated<kRule>(d, n, g, w, s0 + j, s1 + j), a.master + at);
    }
    if constexpr (!A::kByte) {
      const auto low = hn::And(word, hn::Set(du, 0xFFFFu));
      if constexpr (kStates > 0) encode_moment(d, hn::Load(d, s0 + j), low, a.state[0] + at);
      if constexpr (kStates > 1) {
        encode_moment(d, hn::Load(d, s1 + j), hn::ShiftRight<16>(word), a.state[1] + at);
      }
    }
  }
  if constexpr (A::kByte) {
    const size_t group = i / kGroup;
    if constexpr (kStates > 0) encode_group<4>(s0, random, a.state[0] + i, a.exponents[0] + group);
    if constexpr (kStates > 1) encode_group<5>(s1, random, a.state[1] + i, a.exponents[1] + group);
  }
  if (job.clear_grads) {
    const size_t size = size_of(a.grad_type);
    std::memset(static_cast<char*>(a.grad) + i * size, 0, kGroup * size);
  }
}

template <typename T>
HWY_INLINE void prefetch(const T* array, size_t i, size_t size = sizeof(T)) {
  hwy::Prefetch(reinterpret_cast<const char*>(array) + i * size + kCompactAhead);
}

// Whole groups in place, then the last elements in padded copies.
template <Rule kRule, typename W, StateFormat kFormat>
HWY_INLINE void update_compact_span(const ApplySpan& span, const ApplyJob job) {
  using A = CompactArrays<W, kFormat>;
  constexpr size_t kStates = state_buffers(kRule);
  const RuleNumbers n = *span.numbers;  // a copy, which cannot alias the stores below
  A a = {static_cast<typename A::Master*>(span.master),
         static_cast<typename A::Narrow*>(span.weight),
         span.grad,
         {static_cast<typename A::Moment*>(span.state[0]),
          static_cast<typename A::Moment*>(span.state[1])},
         {span.exponents[0], span.exponents[1]},
         span.grad_type};
  const size_t grad_size = size_of(a.grad_type);
  const size_t whole = span.count / kGroup * kGroup;
  for (size_t i = 0; i < whole; i += kGroup) {
    prefetch(static_cast<const char*>(a.grad), i, grad_size);
    prefetch(a.master, i);
    if constexpr (A::kNarrow) prefetch(a.weight, i);
    for (size_t b = 0; b < kStates; ++b) prefetch(a.state[b], i);
    update_group<kRule>(n, job, a, i, span.first_index + static_cast<uint32_t>(i),
                        span.random_key);
  }
  const size_t rest = span.count - whole;
  if (rest == 0) return;

  typename A::Master master[kGroup] = {};
  typename A::Narrow weight[kGroup] = {};
  typename A::Moment state[2][kGroup] = {};
  float grad[kGroup] = {};  // has room for every type
  auto* const grad_end = static_cast<char*>(a.grad) + whole * grad_size;
  const auto copy = [rest](void* to, const void* from, size_t size)
                        HWY_ATTR { std::memcpy(to, from, rest * size); };
  copy(master, a.master + whole, sizeof(master[0]));
  if (A::kNarrow) copy(weight, a.weight + whole, sizeof(weight[0]));
  for (size_t b = 0; b < kStates; ++b) copy(state[b], a.state[b] + whole, sizeof(state[b][0]));
  copy(grad, grad_end, grad_size);
  const size_t group = whole / kGroup;
  const A padded = {master,
                    weight,
                    grad,
                    {state[0], state[1]},
                    {a.exponents[0] + group, a.exponents[1] + group},
                    a.grad_type};
  update_group<kRule>(n, job, padded, 0, span.first_index + static_cast<uint32_t>(whole),
                      span.random_key);
  copy(a.master + whole, master, sizeof(master[0]));
  if (A::kNarrow) copy(a.weight + whole, weight, sizeof(weight[0]));
  for (size_t b = 0; b < kStates; ++b) copy(a.state[b] + whole, state[b], sizeof(state[b][0]));
  if (job.clear_grads) copy(grad_end, grad, grad_size);
}

template <Rule kRule, typename W, StateFormat kFormat>
void update_compact_spans(const ApplySpan* spans, size_t count, const ApplyJob& job) {
  for (size_t i = 0; i < count; ++i) update_compact_span<kRule, W, kFormat>(spans[i], job);
}

// Picks by format, then by type of weight, then by rule.
template <StateFormat kFormat, typename W>
ApplyFunction compact_by_rule(Rule rule) {
  if (rule == Rule::kSgd) return &update_compact_spans<Rule::kSgd, W, kFormat>;
  if (rule == Rule::kSgdMomentum) return &update_compact_spans<Rule::kSgdMomentum, W, kFormat>;
  if (rule == Rule::kLion) return &update_compact_spans<Rule::kLion, W, kFormat>;
  return &update_compact_spans<Rule::kAdam, W, kFormat>;
}

template <StateFormat kFormat>
ApplyFunction compact_by_weight(const KernelKind& kind) {
  if (kind.weight == WeightKind::kF16Master) return compact_by_rule<kFormat, f16>(kind.rule);
  if (kind.weight == WeightKind::kBF16Master) return compact_by_rule<kFormat, bf16>(kind.rule);
  return compact_by_rule<kFormat, float>(kind.rule);
}

ApplyFunction compact_function_for_target(const KernelKind& kind) {
  return kind.state == StateFormat::kByte ? compact_by_weight<StateFormat::kByte>(kind)
                                          : compact_by_weight<StateFormat::kHalf>(kind);
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_APPLY_COMPACT_INL_H_
