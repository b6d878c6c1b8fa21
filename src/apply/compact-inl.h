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

#include <array>
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
HWY_INLINE void store_bytes(D, BitsOf<D> bits, uint8_t* to) {
  hn::StoreU(hn::U8FromU32(bits), hn::Rebind<uint8_t, D>(), to);
}

// HalfRange::place() and its inverse.
template <class D>
HWY_INLINE BitsOf<D> place_half_range(D d, hn::Vec<D> value, BitsOf<D> dither) {
  using Range = HalfRange<0>;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto lowest = hn::Set(du, Range::kMinBits);
  const auto subnormal = hn::BitCast(di, hn::Add(value, hn::BitCast(d, lowest)));
  const auto normal =
      hn::Add(hn::BitCast(di, value), hn::Set(di, static_cast<int32_t>(Range::kBinade)));
  const auto bits = hn::BitCast(du, hn::Max(subnormal, normal));
  return hn::Add(hn::Sub(bits, lowest), dither);
}

template <class D>
HWY_INLINE hn::Vec<D> unplace_half_range(D d, BitsOf<D> placed) {
  using Range = HalfRange<0>;
  const hn::Rebind<uint32_t, D> du;
  const auto lowest = hn::Set(du, Range::kMinBits);
  const auto bits = hn::Add(placed, lowest);
  const auto subnormal = hn::Sub(hn::BitCast(d, bits), hn::BitCast(d, lowest));
  const auto normal = hn::BitCast(d, hn::Sub(bits, hn::Set(du, Range::kBinade)));
  return hn::Min(subnormal, normal);
}

// See SplitMaster.
template <class D, typename W, int kBits>
struct Masters {
  using Split = SplitMaster<W, kBits>;
  using Remainder = typename Split::Remainder;
  using DI = hn::Rebind<int32_t, D>;
  using DU = hn::Rebind<uint32_t, D>;
  static constexpr bool kExtraBits = Split::kHalf && kBits == 16;

  static HWY_INLINE hn::Vec<D> join(D d, const W* weight, const Remainder* remainder) {
    const DI di;
    const DU du;
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du, load_halves(d, weight)));
    WordsOf<D> below;
    if constexpr (kBits == 8) {
      below = hn::ShiftLeft<8>(load_bytes<int32_t>(d, remainder));
    } else {
      const auto* from = reinterpret_cast<const int16_t*>(remainder);
      below = hn::PromoteTo(di, hn::LoadU(hn::Rebind<int16_t, D>(), from));
    }
    const auto magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, kMagnitude)));
    // Only a weight of 0 can have a sum below 0.
    const auto whole = hn::BitCast(du, hn::Max(hn::Add(magnitude, below), hn::Zero(di)));
    const auto sign = hn::BitCast(d, hn::AndNot(hn::Set(du, kMagnitude), bits));
    if constexpr (!Split::kHalf) {
      return hn::Or(sign, hn::BitCast(d, whole));
    } else if constexpr (!kExtraBits) {
      return hn::Or(sign, unplace_half_range(d, hn::ShiftRight<3>(whole)));
    } else {
      const auto normal = hn::Add(hn::ShiftRight<3>(whole), hn::Set(du, 0x38000000u));
      const auto subnormal =
          hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, whole)), hn::Set(d, 0x1p-40f)));
      const auto is_normal =
          hn::Gt(hn::BitCast(di, whole), hn::Set(di, static_cast<int32_t>(1u << 26) - 1));
      const auto value = hn::IfThenElse(hn::RebindMask(du, is_normal), normal, subnormal);
      return hn::Or(sign, hn::BitCast(d, value));
    }
  }

  static HWY_INLINE void split(D d, hn::Vec<D> master, BitsOf<D> random, W* weight,
                               Remainder* remainder) {
    const DI di;
    const DU du;
    auto dither = hn::Zero(du);
    if constexpr (Split::kDropped > 0) dither = hn::ShiftRight<32 - Split::kDropped>(random);
    BitsOf<D> aligned, rounded;
    if constexpr (!Split::kHalf) {
      const auto quiet = hn::BitCast(d, hn::Set(du, Split::kQuietNan));
      const auto usable = hn::IfThenElse(hn::IsNaN(master), quiet, master);
      aligned = hn::Add(hn::BitCast(du, usable), dither);
      rounded = hn::ShiftRight<16>(hn::Add(aligned, hn::Set(du, Split::kHalfUnit)));
    } else {
      const auto limit = hn::Set(di, static_cast<int32_t>(float_bits(Split::kHalfInf)));
      const auto magnitude = hn::BitCast(d, hn::Min(magnitude_bits(d, master), limit));
      if constexpr (kExtraBits) {
        aligned = extra_bits(d, magnitude);
      } else {
        aligned = hn::ShiftLeft<3>(place_half_range(d, magnitude, dither));
      }
      const auto sign = hn::AndNot(hn::Set(du, kMagnitude), hn::BitCast(du, master));
      const auto sum = hn::Or(hn::Add(aligned, hn::Set(du, Split::kHalfUnit)), sign);
      rounded = hn::ShiftRight<16>(sum);
    }
    store_halves(d, low_halves(d, rounded), weight);
    if constexpr (kBits == 8) {
      store_bytes(d, hn::And(hn::ShiftRight<8>(aligned), hn::Set(du, 0xFFu)), remainder);
    } else {
      const auto low = hn::And(aligned, hn::Set(du, 0xFFFFu));
      store_halves(d, low_halves(d, low), remainder);
    }
  }

 private:
  // SplitMaster::aligned_half() with 16 bits.
  static HWY_INLINE BitsOf<D> extra_bits(D d, hn::Vec<D> magnitude) {
    const DI di;
    const DU du;
    const auto is_subnormal = hn::Lt(magnitude, hn::Set(d, 0x1p-14f));
    // Zero where it is not used: larger numbers have no integer.
    const auto units = hn::IfThenElseZero(is_subnormal, hn::Mul(magnitude, hn::Set(d, 0x1p40f)));
    const auto subnormal = hn::BitCast(du, hn::ConvertTo(di, units));
    const auto normal =
        hn::ShiftLeft<3>(hn::Sub(hn::BitCast(du, magnitude), hn::Set(du, 0x38000000u)));
    return hn::IfThenElse(hn::RebindMask(du, is_subnormal), subnormal, normal);
  }
};

template <class D>
HWY_INLINE WordsOf<D> moment_magnitudes(D d, hn::Vec<D> value) {
  const hn::Rebind<int32_t, D> di;
  return hn::Min(magnitude_bits(d, value), hn::Set(di, static_cast<int32_t>(kLargestMoment)));
}

// See FirstMoment and SecondMoment.
struct FirstMoments {
  using Code = FirstMoment;
  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D d, const uint8_t* codes, uint32_t exponent) {
    const auto unit = hn::Set(d, bits_float(exponent << 23));
#if HEADROOM_NATIVE_F16
    // An f16 has the same exponents, a bit further up, and more mantissa.
    const hn::Rebind<uint16_t, D> d16;
    const auto code = load_bytes<uint16_t>(d, codes);
    const auto sign = hn::And(hn::ShiftLeft<8>(code), hn::Set(d16, 0x8000));
    const auto magnitude = hn::And(hn::ShiftLeft<7>(code), hn::Set(d16, 0x3F80));
    return hn::Mul(half_to_float(d, hn::Or(sign, magnitude)), unit);
#else
    const hn::Rebind<uint32_t, D> du;
    const auto code = load_bytes<uint32_t>(d, codes);
    const auto placed = hn::ShiftLeft<20>(hn::And(code, hn::Set(du, 0x7Fu)));
    const auto value = hn::Mul(unplace_half_range(d, placed), unit);
    const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du, 0x80u)));
    return hn::Or(value, hn::BitCast(d, sign));
#endif
  }
  template <class D>
  static HWY_INLINE BitsOf<D> encode(D d, hn::Vec<D> value, uint32_t exponent, BitsOf<D> random) {
    const hn::Rebind<uint32_t, D> du;
    const auto magnitude = hn::BitCast(d, moment_magnitudes(d, value));
    const auto scaled = hn::Mul(magnitude, hn::Set(d, bits_float((254 - exponent) << 23)));
    const auto dither = hn::And(random, hn::Set(du, 0xFFFFFu));
    const auto code = hn::ShiftRight<20>(place_half_range(d, scaled, dither));
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, value)), hn::Set(du, 0x80u));
    return hn::Or(code, sign);
  }
};

struct SecondMoments {
  using Code = SecondMoment;
  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D d, const uint8_t* codes, uint32_t exponent) {
    const hn::Rebind<uint32_t, D> du;
    const auto code = hn::ShiftLeft<20>(load_bytes<uint32_t>(d, codes));
    return hn::BitCast(d, hn::Add(code, hn::Set(du, Code::first_bits(exponent))));
  }
  template <class D>
  static HWY_INLINE BitsOf<D> encode(D d, hn::Vec<D> value, uint32_t exponent, BitsOf<D> random) {
    const hn::Rebind<int32_t, D> di;
    const hn::Rebind<uint32_t, D> du;
    const auto dither = hn::BitCast(di, hn::ShiftRight<12>(random));
    const auto first = hn::Set(di, static_cast<int32_t>(Code::first_bits(exponent)));
    const auto above = hn::Sub(hn::Add(moment_magnitudes(d, value), dither), first);
    return hn::ShiftRight<20>(hn::BitCast(du, hn::Max(above, hn::Zero(di))));
  }
};

// Encodes a group, whose exponent follows from its largest element. `random`: dither_word().
template <class Moments>
HWY_INLINE void encode_group(const float* values, const uint32_t* random, uint8_t* codes,
                             uint8_t* exponent) {
  const DF d;
  const hn::Rebind<int32_t, DF> di;
  const hn::Rebind<uint32_t, DF> du;
  auto largest = hn::Zero(di);
  for (size_t j = 0; j < kGroup; j += kFloatLanes) {
    largest = hn::Max(largest, moment_magnitudes(d, hn::Load(d, values + j)));
  }
  const auto top = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
  const uint32_t shared = Moments::Code::exponent(top);
  *exponent = static_cast<uint8_t>(shared);
  for (size_t j = 0; j < kGroup; j += kFloatLanes) {
    const auto code = Moments::encode(d, hn::Load(d, values + j), shared, hn::Load(du, random + j));
    store_bytes(d, code, codes + j);
  }
}

// Moments in bf16, see encode_moment(). `dither`: 16 bits.
template <class D>
HWY_INLINE void store_moments(D d, hn::Vec<D> value, BitsOf<D> dither, bf16* to) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto limit = hn::Set(di, 0x7F7F0000);
  const auto magnitude = hn::Min(magnitude_bits(d, value), limit);
  const auto sum = hn::Min(hn::Add(magnitude, hn::BitCast(di, dither)), limit);
  const auto kept = hn::ShiftRight<16>(hn::BitCast(du, sum));
  const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(du, value)), hn::Set(du, 0x8000u));
  store_halves(d, low_halves(d, hn::Or(sign, kept)), to);
}

// dither_word() of the elements from `index` on, a multiple of the number of lanes. The hashes are
// computed as scalars, by units of the CPU that are idle otherwise.
template <class D>
HWY_INLINE BitsOf<D> dither_words(D, uint32_t index, uint32_t key) {
  const hn::Rebind<uint32_t, D> du;
  constexpr auto kFactors = [] {
    std::array<uint32_t, 16> factors{};
    for (uint32_t i = 0; i < 16; ++i) factors[i] = dither_factor(i % 8);
    return factors;
  }();
  auto hash = hn::Set(du, dither_hash(index, key));
  if constexpr (hn::MaxLanes(D()) > 8) {
    const auto second = hn::Set(du, dither_hash(index + 8, key));
    hash = hn::IfThenElse(hn::FirstN(du, 8), hash, second);
  }
  return hn::Mul(hash, hn::LoadU(du, kFactors.data() + index % 8));
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
    const auto word = dither_words(d, index + static_cast<uint32_t>(j), key);
    if constexpr (A::kByte) {
      const size_t group = i / kGroup;
      hn::Store(word, du, random + j);
      if constexpr (kStates > 0) {
        hn::Store(FirstMoments::decode(d, a.state[0] + at, a.exponents[0][group]), d, s0 + j);
      }
      if constexpr (kStates > 1) {
        hn::Store(SecondMoments::decode(d, a.state[1] + at, a.exponents[1][group]), d, s1 + j);
      }
    } else {
      if constexpr (kStates > 0) hn::Store(load_float(d, a.state[0] + at), d, s0 + j);
      if constexpr (kStates > 1) hn::Store(load_float(d, a.state[1] + at), d, s1 + j);
    }
    const auto g = hn::Mul(load_grad(d, a.grad, a.grad_type, at), hn::Set(d, n.multiplier));
    if constexpr (A::kNarrow) {
      const auto w = Split::join(d, a.weight + at, a.master + at);
      Split::split(d, updated<kRule, true>(d, n, g, w, s0 + j, s1 + j), word, a.weight + at,
                   a.master + at);
    } else {
      const auto w = load_float(d, a.master + at);
      store_float(d, updated<kRule, true>(d, n, g, w, s0 + j, s1 + j), a.master + at);
    }
    if constexpr (!A::kByte) {
      const auto low = hn::And(hn::ShiftRight<4>(word), hn::Set(du, 0xFFFFu));
      if constexpr (kStates > 0) store_moments(d, hn::Load(d, s0 + j), low, a.state[0] + at);
      if constexpr (kStates > 1) {
        store_moments(d, hn::Load(d, s1 + j), hn::ShiftRight<16>(word), a.state[1] + at);
      }
    }
  }
  if constexpr (A::kByte) {
    const size_t group = i / kGroup;
    if constexpr (kStates > 0)
      encode_group<FirstMoments>(s0, random, a.state[0] + i, a.exponents[0] + group);
    if constexpr (kStates > 1)
      encode_group<SecondMoments>(s1, random, a.state[1] + i, a.exponents[1] + group);
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
  const A a = {static_cast<typename A::Master*>(span.state.master),
               static_cast<typename A::Narrow*>(span.weight),
               span.grad,
               {static_cast<typename A::Moment*>(span.state.moments[0]),
                static_cast<typename A::Moment*>(span.state.moments[1])},
               {span.state.exponents[0], span.state.exponents[1]},
               span.grad_type};
  const size_t grad_size = size_of(a.grad_type);
  const size_t whole = span.count / kGroup * kGroup;
  for (size_t i = 0; i < whole; i += kGroup) {
    prefetch(static_cast<const char*>(a.grad), i, grad_size);
    prefetch(a.master, i);
    if constexpr (A::kNarrow) prefetch(a.weight, i);
    for (size_t b = 0; b < kStates; ++b) prefetch(a.state[b], i);
    update_group<kRule>(n, job, a, i, span.first_index + static_cast<uint32_t>(i), span.random_key);
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
  const auto exponent = [&](size_t moment) {
    return A::kByte && moment < kStates ? a.exponents[moment] + whole / kGroup : nullptr;
  };
  const A padded = {master,     weight, grad, {state[0], state[1]}, {exponent(0), exponent(1)},
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
