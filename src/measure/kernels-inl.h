// The measuring kernels of one SIMD target.
//
// Results are the same bits on every target, because the order of additions is fixed: an element is
// added to one of 32 lanes, chosen by its position alone and not by the width of the vectors, and
// lanes are moved to double every 1024 elements. A multiply-add is fused only where the product is
// exact.
//
// A block of 1024 elements is first summed without any checks. Its largest magnitude then says
// whether the sums can be used; if not, the block is read again by the scalar code in scalar.h.
#if defined(HEADROOM_SRC_MEASURE_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_MEASURE_KERNELS_INL_H_
#undef HEADROOM_SRC_MEASURE_KERNELS_INL_H_
#else
#define HEADROOM_SRC_MEASURE_KERNELS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include <hwy/cache_control.h>

#include "measure/kernels.h"
#include "measure/scalar.h"
#include "measure/squares-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

// Distance of software prefetching, in bytes. The hardware prefetcher stops at the end of each page
// of 4096 bytes. Measured on Zen 5: 5,120 to 16,384 are good, 1,024 is slower than none.
constexpr size_t kPrefetchAhead = 8192;

// Totals of one range: 32 lanes of sums, and the largest magnitudes.
template <typename T>
struct Totals {
  static constexpr size_t kSums = kGroup / kDoubleLanes;

  hn::Vec<DD> sums[kSums];
  hn::Vec<typename Group<T>::D> maximum;

  HWY_INLINE Totals() : maximum(hn::Zero(typename Group<T>::D())) {
    for (auto& sum : sums) sum = hn::Zero(DD());
  }

  // Adds the lanes pairwise, in an order that does not depend on the width of the vectors.
  HWY_INLINE double sum() const {
    alignas(64) double lanes[kGroup];
    for (size_t i = 0; i < kSums; ++i) hn::Store(sums[i], DD(), lanes + i * kDoubleLanes);
    for (size_t width = kGroup / 2; width > 0; width /= 2) {
      for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }

  HWY_INLINE double amax() const {
    alignas(64) typename Group<T>::Bits lanes[Group<T>::kLanes];
    hn::Store(maximum, typename Group<T>::D(), lanes);
    return widen(std::bit_cast<T>(*std::max_element(lanes, lanes + Group<T>::kLanes)));
  }
};

// Up to 32 groups, from one tensor or several. Its sums become part of the totals only if
// sums_are_valid(). For types that are summed in double, the sums start from the totals, which
// saves an addition at the end.
template <typename T>
struct Block {
  using Bits = typename Group<T>::Bits;
  using DBits = typename Group<T>::D;
  using DSum = typename Squares<T>::DSum;
  static constexpr bool kWide = sizeof(hn::TFromD<DSum>) == sizeof(double);
  static constexpr size_t kMaxima = Group<T>::kVectors < 2 ? 1 : 2;  // two dependency chains

  hn::Vec<DSum> sums[Squares<T>::kSums];
  hn::Vec<DBits> maxima[kMaxima];
  size_t groups = 0;

  HWY_INLINE explicit Block(const Totals<T>& totals) { reset(totals); }

  HWY_INLINE void reset(const Totals<T>& totals) {
#pragma GCC unroll 32
    for (size_t i = 0; i < Squares<T>::kSums; ++i) {
      if constexpr (kWide) {
        sums[i] = totals.sums[i];
      } else {
        sums[i] = hn::Zero(DSum());
      }
    }
    for (auto& maximum : maxima) maximum = hn::Zero(DBits());
    groups = 0;
  }

  HWY_INLINE void add_group(const Group<T>& group) {
    const auto mask = hn::Set(DBits(), std::numeric_limits<Bits>::max());
#pragma GCC unroll 32
    for (size_t i = 0; i < Group<T>::kVectors; ++i) {
      auto& maximum = maxima[i % kMaxima];
      maximum = hn::Max(maximum, hn::And(group.vectors[i], mask));
    }
    Squares<T>::add(group, sums);
    ++groups;
  }

  static HWY_INLINE Group<T> load(const T* p) {
    Group<T> group;
#pragma GCC unroll 32
    for (size_t i = 0; i < Group<T>::kVectors; ++i) {
      group.vectors[i] =
          hn::LoadU(DBits(), reinterpret_cast<const Bits*>(p) + i * Group<T>::kLanes);
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
      // Forces the vector into a register. Without this the compiler folds the load into each of
      // its uses, and an unaligned vector that crosses a cache line costs double every time.
      asm("" : "+x"(group.vectors[i].raw));
#endif
    }
    return group;
  }

  // The last `rest` elements before `end`, in the last lanes of a group whose other lanes are zero.
  // Reads the 32 elements before `end`, and masks with a window into an array of 32 zeros followed
  // by 32 ones.
  static HWY_INLINE Group<T> load_tail(const T* end, size_t rest) {
    static constexpr auto kMask = [] {
      std::array<Bits, 2 * kGroup> mask{};
      for (size_t i = kGroup; i < 2 * kGroup; ++i) mask[i] = -1;
      return mask;
    }();
    Group<T> group = load(end - kGroup);
#pragma GCC unroll 32
    for (size_t i = 0; i < Group<T>::kVectors; ++i) {
      const auto mask = hn::LoadU(DBits(), kMask.data() + rest + i * Group<T>::kLanes);
      group.vectors[i] = hn::And(group.vectors[i], mask);
    }
    return group;
  }

  // Adds `count` elements, which must fit into the block. The last group may be partial. kPrefetch:
  // what is kPrefetchAhead behind them will be read, too.
  template <bool kPrefetch = false>
  HWY_INLINE void add(const T* p, size_t count) {
    const T* const end = p + count;
    const size_t rest = count % kGroup;
    for (size_t i = count / kGroup; i > 0; --i, p += kGroup) {
      if constexpr (kPrefetch) {
        constexpr size_t kCacheLine = 64;
        const char* const ahead = reinterpret_cast<const char*>(p) + kPrefetchAhead;
        for (size_t line = 0; line < kGroup * sizeof(T); line += kCacheLine) {
          hwy::Prefetch(ahead + line);
        }
      }
      add_group(load(p));
    }
    if (rest == 0) return;
    if (count > kGroup) return add_group(load_tail(end, rest));
    T padded[kGroup] = {};  // too few to read 32 before the end
    std::memcpy(static_cast<void*>(padded + kGroup - rest), p, rest * sizeof(T));
    add_group(load(padded));
  }

  // Whether all elements are finite and no square has left the range of the sums.
  HWY_INLINE bool sums_are_valid() const {
    const DBits db;
    const auto maximum = hn::Max(maxima[0], maxima[kMaxima - 1]);
    const auto at_least = [&](Bits limit) HWY_ATTR {
      return !hn::AllTrue(db, hn::Lt(maximum, hn::Set(db, limit)));
    };
    using Limits = SquareLimits<T>;
    if (HWY_UNLIKELY(at_least(Limits::kTooLarge))) return false;
    return Limits::kTooSmall == 1 || HWY_LIKELY(at_least(Limits::kTooSmall)) || !at_least(1);
  }

  HWY_INLINE void commit(Totals<T>* totals) const {
    for (const auto& maximum : maxima) totals->maximum = hn::Max(totals->maximum, maximum);
#pragma GCC unroll 32
    for (size_t i = 0; i < Totals<T>::kSums; ++i) {
      if constexpr (kWide) {
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

// Multiplies `lanes` elements by `inverse_scale`, and counts those that rounding made zero or inf.
HWY_INLINE void unscale_vector(const double* from, double* to, float inverse_scale, size_t,
                               GradStats* out) {
  constexpr uint64_t kInf = Element<double>::kInf;
  const double before = element(from);
  const double after = before * static_cast<double>(inverse_scale);
  out->new_inf += magnitude_of(before) < kInf && magnitude_of(after) >= kInf;
  out->new_zeros += before != 0.0 && after == 0.0;
  std::memcpy(to, &after, sizeof(after));
}

template <typename T>
HWY_INLINE void unscale_vector(const T* from, T* to, float inverse_scale, size_t lanes,
                               GradStats* out) {
  const DF df;
  const hn::Rebind<int32_t, DF> di;
  const auto before = load_float(df, from);
  alignas(64) T rounded[kFloatLanes];
  store_float(df, hn::Mul(before, hn::Set(df, inverse_scale)), rounded);
  const auto after = load_float(df, rounded);
  std::memcpy(static_cast<void*>(to), rounded, lanes * sizeof(T));
  const auto zero = hn::Zero(di);
  const auto largest = hn::Set(di, 0x7F7FFFFF);  // largest finite float
  const auto a = magnitude_bits(df, after);
  const auto b = magnitude_bits(df, before);
  const auto new_zero = hn::And(hn::Eq(a, zero), hn::Gt(b, zero));
  const auto new_inf = hn::AndNot(hn::Gt(b, largest), hn::Gt(a, largest));
  if (HWY_UNLIKELY(!hn::AllFalse(di, hn::Or(new_zero, new_inf)))) {
    out->new_zeros += static_cast<int64_t>(hn::CountTrue(di, new_zero));
    out->new_inf += static_cast<int64_t>(hn::CountTrue(di, new_inf));
  }
}

template <typename T>
void unscale_elements(T* p, size_t count, float inverse_scale, GradStats* out) {
  constexpr size_t kStep = sizeof(T) == sizeof(double) ? 1 : kFloatLanes;
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) unscale_vector(p + i, p + i, inverse_scale, kStep, out);
  if (i < count) {
    alignas(64) T tail[kStep] = {};
    std::memcpy(static_cast<void*>(tail), p + i, (count - i) * sizeof(T));
    unscale_vector(tail, p + i, inverse_scale, count - i, out);
  }
}

// Calls visit(tensor, data, count) for the piece of each tensor in the range.
template <typename T, typename Visit>
HWY_INLINE void for_pieces(const TensorView* list, const Range& range, const Visit& visit) {
  for (size_t tensor = range.first; tensor <= range.last; ++tensor) {
    const int64_t begin = range.begin_in(tensor);
    const int64_t count = range.end_in(tensor, list) - begin;
    if (count <= 0) continue;
    visit(tensor, static_cast<T*>(list[tensor].data) + begin, static_cast<size_t>(count));
  }
}

// Adds a block whose sums are not valid, tensor by tensor.
template <typename T>
HWY_NOINLINE void add_scalar(const TensorView* list, const Range& range, Totals<T>* totals,
                             GradStats* stats) {
  for_pieces<T>(list, range, [&](size_t tensor, const T* p, size_t count) HWY_ATTR {
    T finite[kBlock];
    copy_finite<T>(p, count, static_cast<int64_t>(tensor), finite, stats);
    Block<T> block(*totals);
    block.add(finite, count);
    if (block.sums_are_valid()) {
      block.commit(totals);
    } else {
      add_scaled_squares<T>(finite, count, stats);
    }
  });
}

// The optional work on a block that was just read and is still in the cache.
template <typename T>
HWY_NOINLINE void do_extras(const TensorView* list, const Range& range, const MeasureJob& job,
                            GradStats* stats, GradDetail* detail) {
  for_pieces<T>(list, range, [&](size_t, T* p, size_t count) HWY_ATTR {
    if (detail != nullptr) add_detail<T>(p, count, detail);
    if (job.unscale) unscale_elements<T>(p, count, job.inverse_scale, stats);
  });
}

template <typename T>
void measure_range(const TensorView* list, const Range& range, const MeasureJob& job,
                   GradStats* stats, GradDetail* detail) {
  constexpr size_t kBlockGroups = kBlock / kGroup;
  constexpr size_t kReach = kBlock * sizeof(T) + kPrefetchAhead;
  const bool extras = detail != nullptr || job.unscale;
  Totals<T> totals;
  Block<T> block(totals);
  Range open = range;  // starts where the current block starts
  const auto close = [&](size_t tensor, int64_t end) HWY_ATTR {
    open.last = tensor;
    open.last_end = end;
    if (HWY_LIKELY(block.sums_are_valid())) {
      block.commit(&totals);
    } else {
      Totals<T> changed = totals;  // a copy: passing &totals would force them out of registers
      add_scalar<T>(list, open, &changed, stats);
      totals = changed;
    }
    if (HWY_UNLIKELY(extras)) do_extras<T>(list, open, job, stats, detail);
    block.reset(totals);
    open.first = tensor;
    open.first_begin = end;
  };
  for (size_t tensor = range.first; tensor <= range.last; ++tensor) {
    const T* data = static_cast<const T*>(list[tensor].data);
    int64_t begin = range.begin_in(tensor);
    const int64_t end = range.end_in(tensor, list);
    stats->count += end - begin;
    while (begin < end) {
      const auto left = static_cast<size_t>(end - begin);
      const size_t room = (kBlockGroups - block.groups) * kGroup;
      const size_t take = left < room ? left : room;
      if (static_cast<size_t>(list[tensor].count - begin) * sizeof(T) > kReach) {
        block.template add<true>(data + begin, take);
      } else {
        block.add(data + begin, take);
      }
      begin += static_cast<int64_t>(take);
      if (block.groups == kBlockGroups) close(tensor, begin);
    }
  }
  close(range.last, range.last_end);
  stats->squares[1] += totals.sum();
  stats->amax = std::max(stats->amax, totals.amax());
}

MeasureFunction measure_function_for_target(DType dtype) {
  return with_type<f16, bf16, float, double>(
      dtype, [](auto element) -> MeasureFunction { return &measure_range<decltype(element)>; });
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_MEASURE_KERNELS_INL_H_
