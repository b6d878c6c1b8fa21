// The measuring kernels of one SIMD target.
//
// The order of additions is part of the promise: an element of a tensor is added in one of 32 lanes,
// chosen by its index alone, whatever the width of the registers; lanes are folded into doubles every
// 1024 elements. A product is exact, or it is multiplied and added in two roundings, never fused, so
// that every target gives the same bits.
#if defined(HEADROOM_SRC_MEASURE_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_MEASURE_KERNELS_INL_H_
#undef HEADROOM_SRC_MEASURE_KERNELS_INL_H_
#else
#define HEADROOM_SRC_MEASURE_KERNELS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "core/convert-inl.h"
#include "measure/careful.h"
#include "measure/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

using DD = hn::CappedTag<double, 8>;
using DFHalf = hn::Rebind<float, DD>;  // as many floats as there are lanes in a DD
constexpr size_t kDoubleLanes = hn::MaxLanes(DD());

// How each element type is read: magnitudes as integers for the maximum, and its squares.
template <typename T>
struct Traits;

template <>
struct Traits<f16> {
  using Bits = int16_t;
  using Sum = float;
  using DSum = DF;
  template <size_t kSums>
  static HWY_INLINE void add_squares(const f16* from, hn::Vec<DF> (&sums)[kSums]) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; ++i) {
      const auto v = load_float(from + i * kFloatLanes);
      sums[i] = hn::MulAdd(v, v, sums[i]);  // the product is exact, so fused or not is the same
    }
  }
};

template <>
struct Traits<bf16> {
  using Bits = int16_t;
  using Sum = float;
  using DSum = DF;
  // Elements with an even index are added in the first half of the lanes, the others in the second:
  // a 32-bit word holds two of them, and each half of it is a float after one instruction.
  template <size_t kSums>
  static HWY_INLINE void add_squares(const bf16* from, hn::Vec<DF> (&sums)[kSums]) {
    const DF df;
    const DU32 du;
    const auto* words = reinterpret_cast<const uint32_t*>(from);
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums / 2; ++i) {
      const auto word = hn::LoadU(du, words + i * kFloatLanes);
      const auto even = hn::BitCast(df, hn::ShiftLeft<16>(word));
      const auto odd = hn::BitCast(df, hn::And(word, hn::Set(du, 0xFFFF0000u)));
      sums[i] = hn::Add(hn::Mul(even, even), sums[i]);
      sums[i + kSums / 2] = hn::Add(hn::Mul(odd, odd), sums[i + kSums / 2]);
    }
  }
};

template <>
struct Traits<float> {
  using Bits = int32_t;
  using Sum = double;
  using DSum = DD;
  template <size_t kSums>
  static HWY_INLINE void add_squares(const float* from, hn::Vec<DD> (&sums)[kSums]) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; ++i) {
      const auto v = hn::PromoteTo(DD(), hn::LoadU(DFHalf(), from + i * kDoubleLanes));
      sums[i] = hn::MulAdd(v, v, sums[i]);  // the product is exact, so fused or not is the same
    }
  }
};

template <>
struct Traits<double> {
  using Bits = int64_t;
  using Sum = double;
  using DSum = DD;
  template <size_t kSums>
  static HWY_INLINE void add_squares(const double* from, hn::Vec<DD> (&sums)[kSums]) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; ++i) {
      const auto v = hn::LoadU(DD(), from + i * kDoubleLanes);
      sums[i] = hn::Add(hn::Mul(v, v), sums[i]);
    }
  }
};

// Running totals over the spans of one job: 32 lanes of sums, and the largest magnitudes.
template <typename T>
struct Totals {
  using Bits = typename Traits<T>::Bits;
  using DBits = hn::CappedTag<Bits, 64 / sizeof(Bits)>;
  static constexpr size_t kBitLanes = hn::MaxLanes(DBits());
  static constexpr size_t kMaxima = kGroup / kBitLanes < 2 ? 1 : 2;
  static constexpr size_t kSums = kGroup / kDoubleLanes;

  hn::Vec<DD> sums[kSums];
  hn::Vec<DBits> maximum;

  HWY_INLINE Totals() : maximum(hn::Zero(DBits())) {
    for (size_t i = 0; i < kSums; ++i) sums[i] = hn::Zero(DD());
  }

  HWY_INLINE double sum() const {
    alignas(64) double lanes[kGroup];
    for (size_t i = 0; i < kSums; ++i) hn::Store(sums[i], DD(), lanes + i * kDoubleLanes);
    for (size_t width = kGroup / 2; width > 0; width /= 2) {
      for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }

  HWY_INLINE Bits largest() const {
    alignas(64) Bits lanes[kBitLanes];
    hn::Store(maximum, DBits(), lanes);
    return *std::max_element(lanes, lanes + kBitLanes);
  }
};

// Adds one group of 32 elements.
template <typename T, size_t kSums, size_t kMaxima>
HWY_INLINE void add_group(const T* HWY_RESTRICT p,
                          hn::Vec<typename Traits<T>::DSum> (&sums)[kSums],
                          hn::Vec<typename Totals<T>::DBits> (&maxima)[kMaxima]) {
  using Bits = typename Traits<T>::Bits;
  const typename Totals<T>::DBits db;
  constexpr size_t kBitLanes = Totals<T>::kBitLanes;
  const auto mask = hn::Set(db, std::numeric_limits<Bits>::max());
#pragma GCC unroll 32
  for (size_t i = 0; i < kGroup / kBitLanes; ++i) {
    const auto bits = hn::LoadU(db, reinterpret_cast<const Bits*>(p) + i * kBitLanes);
    maxima[i % kMaxima] = hn::Max(maxima[i % kMaxima], hn::And(bits, mask));
  }
  Traits<T>::add_squares(p, sums);
}

// The sums of one block, which become part of the totals only if the block is in order. For types
// that are summed in double they start from the totals, so that nothing has to be added later.
template <typename T>
struct BlockSums {
  using DSum = typename Traits<T>::DSum;
  static constexpr size_t kSums = kGroup / hn::MaxLanes(DSum());
  hn::Vec<DSum> sums[kSums];

  HWY_INLINE explicit BlockSums(const Totals<T>& totals) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kSums; ++i) {
      if constexpr (sizeof(typename Traits<T>::Sum) == sizeof(double)) {
        sums[i] = totals.sums[i];
      } else {
        sums[i] = hn::Zero(DSum());
      }
    }
  }

  HWY_INLINE void commit(Totals<T>* totals) const {
#pragma GCC unroll 32
    for (size_t i = 0; i < Totals<T>::kSums; ++i) {
      if constexpr (sizeof(typename Traits<T>::Sum) == sizeof(double)) {
        totals->sums[i] = sums[i];
      } else {
        alignas(64) float lanes[kFloatLanes];
        const size_t lane = i * kDoubleLanes;
        hn::Store(sums[lane / kFloatLanes], DF(), lanes);
        const auto wide = hn::PromoteTo(DD(), hn::LoadU(DFHalf(), lanes + lane % kFloatLanes));
        totals->sums[i] = hn::Add(totals->sums[i], wide);
      }
    }
  }
};

// Adds `groups` groups at `p` and, if not null, one more at `tail`. Returns false, having added
// nothing, if an element is not finite or the squares may leave the range of Sum.
template <typename T>
HWY_INLINE bool add_block(const T* HWY_RESTRICT p, size_t groups, const T* tail,
                          Totals<T>* totals) {
  const typename Totals<T>::DBits db;
  BlockSums<T> block(*totals);
  hn::Vec<typename Totals<T>::DBits> maxima[Totals<T>::kMaxima];
  for (auto& maximum : maxima) maximum = hn::Zero(db);

  for (size_t g = 0; g < groups; ++g) add_group<T>(p + g * kGroup, block.sums, maxima);
  if (tail != nullptr) add_group<T>(tail, block.sums, maxima);

  const auto maximum = hn::Max(maxima[0], maxima[Totals<T>::kMaxima - 1]);
  const auto at_least = [&](typename Totals<T>::Bits limit) HWY_ATTR {
    return !hn::AllTrue(db, hn::Lt(maximum, hn::Set(db, limit)));
  };
  if (HWY_UNLIKELY(at_least(Careful<T>::kTooLarge))) return false;
  if (Careful<T>::kTooSmall > 0 && HWY_UNLIKELY(!at_least(Careful<T>::kTooSmall)) && at_least(1)) {
    return false;
  }
  totals->maximum = hn::Max(totals->maximum, maximum);
  block.commit(totals);
  return true;
}

// Writes the last `rest` of the 32 elements before `end` to `tail`, and zeros in the places of the
// others. Whole vectors, because a short copy that is then read by vectors stalls the processor.
template <typename T>
HWY_INLINE void copy_tail(const T* end, size_t rest, T* tail) {
  using Bits = typename Traits<T>::Bits;
  const typename Totals<T>::DBits db;
  constexpr size_t kBitLanes = Totals<T>::kBitLanes;
  static constexpr auto kMask = [] {
    std::array<Bits, 2 * kGroup> mask{};
    for (size_t i = kGroup; i < 2 * kGroup; ++i) mask[i] = -1;
    return mask;
  }();
  const auto* from = reinterpret_cast<const Bits*>(end - kGroup);
#pragma GCC unroll 32
  for (size_t i = 0; i < kGroup; i += kBitLanes) {
    const auto mask = hn::LoadU(db, kMask.data() + rest + i);
    hn::Store(hn::And(hn::LoadU(db, from + i), mask), db, reinterpret_cast<Bits*>(tail) + i);
  }
}

template <typename T>
HWY_INLINE bool add_elements(const T* p, size_t count, Totals<T>* totals) {
  const size_t groups = count / kGroup;
  const size_t rest = count % kGroup;
  if (rest == 0) return add_block<T>(p, groups, nullptr, totals);
  alignas(64) T tail[kGroup];
  if (groups > 0) {
    copy_tail<T>(p + count, rest, tail);
  } else {
    std::memset(static_cast<void*>(tail), 0, sizeof(tail));
    std::memcpy(static_cast<void*>(tail), p, rest * sizeof(T));
  }
  return add_block<T>(p, groups, tail, totals);
}

// Multiplies one vector of elements, and counts what rounding did to them.
HWY_INLINE void unscale_vector(const double* from, double* to, float inverse_scale, size_t,
                               Partial* out) {
  const double before = *from;
  const double after = before * static_cast<double>(inverse_scale);
  out->new_inf += finite_bits(before) && !finite_bits(after);
  out->new_zeros += before != 0.0 && after == 0.0;
  *to = after;
}

template <typename T>
HWY_INLINE void unscale_vector(const T* from, T* to, float inverse_scale, size_t lanes,
                               Partial* out) {
  const DF df;
  const DI32 di;
  const auto before = load_float(from);
  alignas(64) T rounded[kFloatLanes];
  store_float(hn::Mul(before, hn::Set(df, inverse_scale)), rounded);
  const auto after = load_float(rounded);
  std::memcpy(static_cast<void*>(to), rounded, lanes * sizeof(T));
  const auto zero = hn::Zero(di);
  const auto largest = hn::Set(di, 0x7F7FFFFF);
  const auto a = magnitude_bits(after);
  const auto b = magnitude_bits(before);
  const auto died = hn::And(hn::Eq(a, zero), hn::Gt(b, zero));
  const auto burst = hn::AndNot(hn::Gt(b, largest), hn::Gt(a, largest));
  if (HWY_UNLIKELY(!hn::AllFalse(di, hn::Or(died, burst)))) {
    out->new_zeros += static_cast<int64_t>(hn::CountTrue(di, died));
    out->new_inf += static_cast<int64_t>(hn::CountTrue(di, burst));
  }
}

template <typename T>
void unscale_elements(T* p, size_t count, float inverse_scale, Partial* out) {
  constexpr size_t kStep = sizeof(T) == sizeof(double) ? 1 : kFloatLanes;
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) unscale_vector(p + i, p + i, inverse_scale, kStep, out);
  if (i < count) {
    alignas(64) T tail[kStep] = {};
    std::memcpy(static_cast<void*>(tail), p + i, (count - i) * sizeof(T));
    unscale_vector(tail, p + i, inverse_scale, count - i, out);
  }
}

template <typename T>
void measure_spans(const Span* spans, size_t span_count, const MeasureJob& job, Partial* out) {
  Totals<T> totals;
  for (const Span* span = spans; span != spans + span_count; ++span) {
    T* const data = static_cast<T*>(span->data);
    for (size_t begin = 0; begin < span->count; begin += kBlock) {
      const size_t count = std::min(kBlock, span->count - begin);
      T* const p = data + begin;
      if (HWY_UNLIKELY(!add_elements<T>(p, count, &totals))) {
        T sane[kBlock];
        careful_copy<T>(p, count, span->tensor, sane, &out->stats);
        if (!add_elements<T>(sane, count, &totals)) careful_squares<T>(sane, count, &out->stats);
      }
      if (job.detail) add_detail<T>(p, count, &out->stats.detail);
      if (job.unscale) unscale_elements<T>(p, count, job.inverse_scale, out);
    }
    out->stats.count += static_cast<int64_t>(span->count);
  }
  out->stats.squares.add({totals.sum(), 0});
  out->stats.amax = std::max(out->stats.amax, Careful<T>::from_bits(totals.largest()));
}

const MeasureKernels* measure_kernels_for_target() {
  static constexpr MeasureKernels kKernels = {
      {&measure_spans<f16>, &measure_spans<bf16>, &measure_spans<float>, &measure_spans<double>}};
  return &kKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_MEASURE_KERNELS_INL_H_
