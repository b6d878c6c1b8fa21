// The update kernels of one SIMD target, for FP32 masters and moments (StateFormat::kFull), or
// 16-bit weights without masters.
#if defined(HEADROOM_SRC_APPLY_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_APPLY_KERNELS_INL_H_
#undef HEADROOM_SRC_APPLY_KERNELS_INL_H_
#else
#define HEADROOM_SRC_APPLY_KERNELS_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <hwy/cache_control.h>

#include "apply/kernels.h"
#include "apply/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

// Whether every weight of a vector is a rounding of its master. May be false for NaN and for ties,
// which came_from() decides; never true if others have written one.
template <class D>
HWY_INLINE bool came_from_masters(D d, const float* master, const f16* weight,
                                  bool /*stochastic*/) {
  const auto nearest = to_halves(d, load_float(d, master));
  return hn::AllTrue(hn::Rebind<uint16_t, D>(), hn::Eq(nearest, load_halves(d, weight)));
}
// As integers, a float and its neighbours in bf16 differ by less than the unit of bf16, 0x10000,
// and the nearest one by at most half of it.
template <class D>
HWY_INLINE bool came_from_masters(D d, const float* master, const bf16* weight, bool stochastic) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto difference =
      hn::Sub(hn::BitCast(di, load_float(d, master)), hn::BitCast(di, load_float(d, weight)));
  const auto limit = hn::Set(du, stochastic ? 0x10000u : 0x8000u);
  return hn::AllTrue(du, hn::Lt(hn::BitCast(du, hn::Abs(difference)), limit));
}

// Calls written(i, weight i) for the weights that are no roundings of their masters, until it
// returns true, and returns whether it did.
template <typename W, typename Written>
HWY_INLINE bool find_written(const float* master, const W* weight, size_t count, bool stochastic,
                             const Written& written) {
  const auto found = [&](size_t i) {
    W w;
    std::memcpy(static_cast<void*>(&w), weight + i, sizeof(W));  // may have any alignment
    return !came_from(master[i], w.bits, W(master[i]).bits, stochastic) && written(i, w);
  };
  for (size_t i = 0; i < count;) {
    const bool whole = i + kFloatLanes <= count;
    const size_t end = whole ? i + kFloatLanes : count;
    if (whole && came_from_masters(DF(), master + i, weight + i, stochastic)) i = end;
    for (; i < end; ++i) {
      if (found(i)) return true;
    }
  }
  return false;
}

// See FollowKernels.
template <typename W>
bool samples_written(const SampleSpan& span) {
  constexpr int64_t kPrefetchSamples = 8;
  const auto* const weight = static_cast<const W*>(span.weight);
  const auto place = [&](int64_t group) {
    return CpuSamples::place(span.random_base, group, span.count);
  };
  for (int64_t group = span.first_group; group < span.end_group; ++group) {
    if (group + kPrefetchSamples < span.end_group) {
      const int64_t ahead = place(group + kPrefetchSamples);
      hwy::Prefetch(span.master + ahead);
      hwy::Prefetch(weight + ahead);
    }
    const int64_t first = place(group);
    const auto count = static_cast<size_t>(std::min(CpuSamples::kSize, span.count - first));
    const auto stop = [](size_t, W) { return true; };
    if (find_written(span.master + first, weight + first, count, span.stochastic, stop))
      return true;
  }
  return false;
}

template <typename W>
void follow_weights(float* master, const void* weight, size_t count, bool stochastic) {
  find_written(master, static_cast<const W*>(weight), count, stochastic, [&](size_t i, W written) {
    master[i] = static_cast<float>(written);
    return false;
  });
}

FollowKernels follow_kernels_for_target(DType dtype) {
  if (dtype == DType::kF16) return {&samples_written<f16>, &follow_weights<f16>};
  return {&samples_written<bf16>, &follow_weights<bf16>};
}

// The pointers of a span, typed and in registers.
template <typename G, typename W>
struct Arrays {
  float* HWY_RESTRICT master;
  W* HWY_RESTRICT weight;
  G* HWY_RESTRICT grad;
  float* HWY_RESTRICT s0;
  float* HWY_RESTRICT s1;
  uint32_t first_index;
  uint32_t random_key;
  bool follow;  // masters follow weights that others have written
};

// Distance of software prefetching, in elements. The arithmetic takes about as long as the memory
// accesses; the hardware prefetcher alone does not overlap the two. Measured: 64 to 128 are good,
// 160 and more are slower than no prefetching.
constexpr size_t kPrefetchAhead = 96;

// Elements of an array of floats in a cache line, which is prefetched as a whole.
constexpr size_t kLine = 16;

template <Rule kRule, bool kMaster, typename G, typename W>
HWY_INLINE void prefetch_line(const Arrays<G, W>& a, size_t i) {
  constexpr size_t kStates = state_buffers(kRule);
  if constexpr (kMaster) hwy::Prefetch(a.master + i + kPrefetchAhead);
  if constexpr (kStates > 0) hwy::Prefetch(a.s0 + i + kPrefetchAhead);
  if constexpr (kStates > 1) hwy::Prefetch(a.s1 + i + kPrefetchAhead);
  hwy::Prefetch(a.grad + i + kPrefetchAhead);
}

// Updates one vector in memory. W is float for FP32 weights, which have no 16-bit copy.
template <Rule kRule, bool kMaster, class D, typename G, typename W>
HWY_INLINE void update_vector(D d, const RuleNumbers& n, const ApplyJob job, const Arrays<G, W>& a,
                              size_t i) {
  hn::Vec<D> w;
  if constexpr (kMaster && !std::is_same_v<W, float>) {
    const bool stochastic = std::is_same_v<W, bf16> && job.stochastic_rounding;
    if (a.follow && !came_from_masters(d, a.master + i, a.weight + i, stochastic)) {
      follow_weights<W>(a.master + i, a.weight + i, hn::Lanes(d), stochastic);
    }
  }
  if constexpr (kMaster) {
    w = load_float(d, a.master + i);
  } else {
    w = load_float(d, a.weight + i);
  }
  // Unscaling and clipping are one multiplication.
  const auto g = hn::Mul(load_float(d, a.grad + i), hn::Set(d, n.multiplier));
  w = updated<kRule, false>(d, n, g, w, a.s0 + i, a.s1 + i);
  if constexpr (kMaster) store_float(d, w, a.master + i);
  if constexpr (std::is_same_v<W, bf16>) {
    if (job.stochastic_rounding) {
      const uint32_t index = a.first_index + static_cast<uint32_t>(i);
      const auto random = hn::ShiftRight<16>(random_words(d, index, a.random_key));
      store_biased(d, w, random, a.weight + i);
    } else {
      store_float(d, w, a.weight + i);
    }
  } else if constexpr (std::is_same_v<W, f16>) {
    store_float(d, w, a.weight + i);
  }
  if (job.clear_grads) store_float(d, hn::Zero(d), a.grad + i);
}

// Processes whole cache lines, then vectors of 4, then the last 1 to 3 elements in padded copies.
template <Rule kRule, typename G, typename W, bool kMaster>
HWY_INLINE void update_span(const ApplySpan& span, const ApplyJob job) {
  const RuleNumbers n = *span.numbers;  // a copy, which cannot alias the stores below
  const Arrays<G, W> a = {static_cast<float*>(span.state.master),
                          static_cast<W*>(span.weight),
                          static_cast<G*>(span.grad),
                          static_cast<float*>(span.state.moments[0]),
                          static_cast<float*>(span.state.moments[1]),
                          span.first_index,
                          span.random_key,
                          *span.follow != 0};
  using D4 = hn::CappedTag<float, 4>;
  size_t i = 0;
  for (; i + kLine <= span.count; i += kLine) {
    prefetch_line<kRule, kMaster>(a, i);
    for (size_t k = 0; k < kLine; k += kFloatLanes) {
      update_vector<kRule, kMaster>(DF(), n, job, a, i + k);
    }
  }
  constexpr size_t kFew = hn::MaxLanes(D4());
  for (; i + kFew <= span.count; i += kFew) update_vector<kRule, kMaster>(D4(), n, job, a, i);
  const size_t rest = span.count - i;
  if (rest == 0) return;

  constexpr size_t kStates = state_buffers(kRule);
  float master[4] = {}, s0[4] = {}, s1[4] = {};
  W weight[4] = {};
  G grad[4] = {};
  const auto copy = [rest](auto* to, const auto* from)
                        HWY_ATTR { std::memcpy(static_cast<void*>(to), from, rest * sizeof(*to)); };
  if (kMaster) copy(master, a.master + i);
  if (!std::is_same_v<W, float>) copy(weight, a.weight + i);
  if (kStates > 0) copy(s0, a.s0 + i);
  if (kStates > 1) copy(s1, a.s1 + i);
  copy(grad, a.grad + i);
  const uint32_t index = a.first_index + static_cast<uint32_t>(i);
  const Arrays<G, W> padded = {master, weight, grad, s0, s1, index, a.random_key, a.follow};
  update_vector<kRule, kMaster>(D4(), n, job, padded, 0);
  if (kMaster) copy(a.master + i, master);
  if (!std::is_same_v<W, float>) copy(a.weight + i, weight);
  if (kStates > 0) copy(a.s0 + i, s0);
  if (kStates > 1) copy(a.s1 + i, s1);
  if (job.clear_grads) copy(a.grad + i, grad);
}

template <Rule kRule, typename G, typename W, bool kMaster>
void update_spans(const ApplySpan* spans, size_t count, const ApplyJob& job) {
  for (size_t i = 0; i < count; ++i) update_span<kRule, G, W, kMaster>(spans[i], job);
}

ApplyFunction apply_function_for_target(const KernelKind& kind) {
  return select_kernel(kind, []<Rule kRule, typename G, typename W, bool kMaster>() {
    return &update_spans<kRule, G, W, kMaster>;
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_APPLY_KERNELS_INL_H_
