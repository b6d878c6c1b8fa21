// The arithmetic of the update rules for one vector, for one SIMD target.
//
// Every multiply, add, divide and square root is rounded separately (no fused multiply-add), so
// that all SIMD targets and GPUs give the same bits.
#if defined(HEADROOM_SRC_APPLY_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_APPLY_UPDATE_INL_H_
#undef HEADROOM_SRC_APPLY_UPDATE_INL_H_
#else
#define HEADROOM_SRC_APPLY_UPDATE_INL_H_
#endif

#include "apply/rules.h"
#include "core/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

// Applies a rule to one vector: updates the state buffers and returns the new weight. Numbers are
// broadcast where they are used; the compiler hoists that out of the loop. cuda.cuh has the same
// operations in the same order. kCompact: see RuleNumbers; the caller adds the weight decay of l2.
template <Rule kRule, bool kCompact, class D, class V = hn::Vec<D>>
HWY_INLINE V updated(D d, const RuleNumbers& n, V g, V w, float* s0, float* s1) {
  if constexpr (!kCompact) g = hn::Add(g, hn::Mul(hn::Set(d, n.l2), w));
  if constexpr (kRule == Rule::kSgd) {
    return hn::Sub(w, hn::Mul(hn::Set(d, n.lr), g));
  } else if constexpr (kRule == Rule::kSgdMomentum) {
    const V b = hn::Add(hn::Mul(hn::Set(d, n.momentum), load_float(d, s0)),
                        hn::Mul(hn::Set(d, n.damped), g));
    store_float(d, b, s0);
    const V direction =
        hn::Add(hn::Mul(hn::Set(d, n.from_grad), g), hn::Mul(hn::Set(d, n.from_buffer), b));
    return hn::Sub(w, hn::Mul(hn::Set(d, n.lr), direction));
  } else if constexpr (kRule == Rule::kLion) {
    const V m = load_float(d, s0);
    const V mixed = hn::Add(hn::Mul(hn::Set(d, n.beta1), m), hn::Mul(hn::Set(d, n.beta1_rest), g));
    store_float(d, hn::Add(hn::Mul(hn::Set(d, n.beta2), m), hn::Mul(hn::Set(d, n.beta2_rest), g)),
                s0);
    const V step =
        hn::IfThenZeroElse(hn::Eq(mixed, hn::Zero(d)), hn::CopySign(hn::Set(d, n.lr), mixed));
    return hn::Sub(hn::Mul(hn::Set(d, n.keep), w), step);
  } else {
    const V m0 = load_float(d, s0);
    const V m = hn::Add(m0, hn::Mul(hn::Set(d, n.beta1_rest), hn::Sub(g, m0)));
    const V v = hn::Add(hn::Mul(hn::Set(d, n.beta2), load_float(d, s1)),
                        hn::Mul(hn::Set(d, n.beta2_rest), hn::Mul(g, g)));
    store_float(d, m, s0);
    store_float(d, v, s1);
    const V root = hn::Sqrt(kCompact ? hn::Max(v, hn::Set(d, kSmallestVariance)) : v);
    const V denominator = hn::Add(root, hn::Set(d, n.eps));
    const V direction =
        kCompact ? hn::Mul(m, hn::Div(hn::Set(d, 1.0f), denominator)) : hn::Div(m, denominator);
    return hn::Sub(hn::Mul(hn::Set(d, n.keep), w), hn::Mul(hn::Set(d, n.step_size), direction));
  }
}

// The hash of random_word().
template <class V>
HWY_INLINE V random_hash(V index, V key) {
  const hn::DFromV<V> du;
  auto x = hn::Xor(index, key);
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(du, 0x7FEB352Du));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(du, 0x846CA68Bu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// random_word() of the elements from `index` on.
template <class D>
HWY_INLINE BitsOf<D> random_words(D, uint32_t index, uint32_t key) {
  const hn::Rebind<uint32_t, D> du;
  return random_hash(hn::Add(hn::Iota(du, 0), hn::Set(du, index)), hn::Set(du, key));
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_APPLY_UPDATE_INL_H_
