// The update kernels of one SIMD target.
//
// Every operation is written out as a multiply, an add, a divide or a square root, each rounded on
// its own (no fused multiply-add), so that all targets, and GPUs, give the same bits.
#if defined(HEADROOM_SRC_APPLY_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADROOM_SRC_APPLY_KERNELS_INL_H_
#undef HEADROOM_SRC_APPLY_KERNELS_INL_H_
#else
#define HEADROOM_SRC_APPLY_KERNELS_INL_H_
#endif

#include <cstring>

#include "apply/kernels.h"
#include "core/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

// The rules. Constructed once per span; update() does one vector and returns the new weight.

class SgdRule {
 public:
  static constexpr Rule kRule = Rule::kSgd;
  HWY_INLINE explicit SgdRule(const RuleNumbers& n)
      : l2_(hn::Set(DF(), n.l2)), lr_(hn::Set(DF(), n.lr)) {}

  HWY_INLINE VF update(VF g, VF w, float*, float*) const {
    g = hn::Add(g, hn::Mul(l2_, w));
    return hn::Sub(w, hn::Mul(lr_, g));
  }

 private:
  VF l2_, lr_;
};

class SgdMomentumRule {
 public:
  static constexpr Rule kRule = Rule::kSgdMomentum;
  HWY_INLINE explicit SgdMomentumRule(const RuleNumbers& n)
      : l2_(hn::Set(DF(), n.l2)),
        lr_(hn::Set(DF(), n.lr)),
        momentum_(hn::Set(DF(), n.momentum)),
        damped_(hn::Set(DF(), n.damped)),
        from_grad_(hn::Set(DF(), n.from_grad)),
        from_buffer_(hn::Set(DF(), n.from_buffer)) {}

  HWY_INLINE VF update(VF g, VF w, float* buffer, float*) const {
    g = hn::Add(g, hn::Mul(l2_, w));
    const VF b = hn::Add(hn::Mul(momentum_, load_float(buffer)), hn::Mul(damped_, g));
    store_float(b, buffer);
    const VF direction = hn::Add(hn::Mul(from_grad_, g), hn::Mul(from_buffer_, b));
    return hn::Sub(w, hn::Mul(lr_, direction));
  }

 private:
  VF l2_, lr_, momentum_, damped_, from_grad_, from_buffer_;
};

class AdamRule {
 public:
  static constexpr Rule kRule = Rule::kAdam;
  HWY_INLINE explicit AdamRule(const RuleNumbers& n)
      : l2_(hn::Set(DF(), n.l2)),
        keep_(hn::Set(DF(), n.keep)),
        beta1_rest_(hn::Set(DF(), n.beta1_rest)),
        beta2_(hn::Set(DF(), n.beta2)),
        beta2_rest_(hn::Set(DF(), n.beta2_rest)),
        correction2_(hn::Set(DF(), n.correction2)),
        step_size_(hn::Set(DF(), n.step_size)),
        eps_(hn::Set(DF(), n.eps)) {}

  HWY_INLINE VF update(VF g, VF w, float* exp_avg, float* exp_avg_sq) const {
    g = hn::Add(g, hn::Mul(l2_, w));
    const VF m0 = load_float(exp_avg);
    const VF m = hn::Add(m0, hn::Mul(beta1_rest_, hn::Sub(g, m0)));
    const VF v = hn::Add(hn::Mul(beta2_, load_float(exp_avg_sq)),
                         hn::Mul(beta2_rest_, hn::Mul(g, g)));
    store_float(m, exp_avg);
    store_float(v, exp_avg_sq);
    const VF denominator = hn::Add(hn::Mul(hn::Sqrt(v), correction2_), eps_);
    return hn::Sub(hn::Mul(keep_, w), hn::Mul(step_size_, hn::Div(m, denominator)));
  }

 private:
  VF l2_, keep_, beta1_rest_, beta2_, beta2_rest_, correction2_, step_size_, eps_;
};

// 16 random bits per lane, from the element's index and the key of the tensor and step.
HWY_INLINE hn::Vec<DU32> random_bits(uint32_t index, uint32_t key) {
  const DU32 du;
  auto x = hn::Xor(hn::Add(hn::Iota(du, 0), hn::Set(du, index)), hn::Set(du, key));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(du, 0x7FEB352Du));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(du, 0x846CA68Bu));
  return hn::ShiftRight<16>(x);
}

HWY_INLINE void store_stochastic(VF v, uint32_t index, uint32_t key, bf16* to) {
  const DU32 du;
  const auto bits = hn::BitCast(du, v);
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, random_bits(index, key)));
  const auto is_nan = hn::Gt(magnitude_bits(v), hn::Set(DI32(), 0x7F800000));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x0040u));
  store_low_half(hn::IfThenElse(hn::RebindMask(du, is_nan), quiet, rounded),
                 reinterpret_cast<uint16_t*>(to));
}

HWY_INLINE void store_weight(VF v, const ApplyJob&, uint32_t, uint32_t, f16* to) {
  store_float(v, to);
}
HWY_INLINE void store_weight(VF v, const ApplyJob& job, uint32_t index, uint32_t key, bf16* to) {
  if (job.stochastic_rounding) {
    store_stochastic(v, index, key, to);
  } else {
    store_float(v, to);
  }
}

// One vector of one parameter, from memory to memory. W is void for FP32 weights, G and W are the
// types of the gradient and the 16-bit weight.
template <class R, typename G, typename W, bool kMaster>
HWY_INLINE void update_vector(const R& rule, VF multiplier, const ApplyJob& job, float* master,
                              W* weight, G* grad, float* s0, float* s1, uint32_t index,
                              uint32_t key) {
  VF w;
  if constexpr (kMaster) {
    w = load_float(master);
  } else {
    w = load_float(weight);
  }
  const VF g = hn::Mul(load_float(grad), multiplier);
  w = rule.update(g, w, s0, s1);
  if constexpr (kMaster) store_float(w, master);
  if constexpr (!std::is_void_v<W>) store_weight(w, job, index, key, weight);
  if (job.clear_grads) store_float(hn::Zero(DF()), grad);
}

template <class R, typename G, typename W, bool kMaster>
HWY_INLINE void update_span(const ApplySpan& span, const ApplyJob& job) {
  constexpr size_t kN = kFloatLanes;
  constexpr size_t kStates = state_buffers(R::kRule);
  const R rule(*span.numbers);
  const VF multiplier = hn::Set(DF(), span.numbers->multiplier);
  float* HWY_RESTRICT master = span.master;
  W* HWY_RESTRICT weight = static_cast<W*>(span.weight);
  G* HWY_RESTRICT grad = static_cast<G*>(span.grad);
  float* HWY_RESTRICT s0 = span.state[0];
  float* HWY_RESTRICT s1 = span.state[1];
  using Stored = std::conditional_t<std::is_void_v<W>, char, W>;  // void has no arrays
  Stored* const weight_bytes = reinterpret_cast<Stored*>(weight);

  size_t i = 0;
  for (; i + kN <= span.count; i += kN) {
    update_vector<R, G, W, kMaster>(rule, multiplier, job, master + i,
                                    static_cast<W*>(static_cast<void*>(weight_bytes + i)), grad + i,
                                    s0 + i, s1 + i, span.first_index + static_cast<uint32_t>(i),
                                    span.random_key);
  }
  const size_t rest = span.count - i;
  if (rest == 0) return;
  // The same on copies, padded with zeros.
  alignas(64) float master_tail[kN] = {};
  alignas(64) float state_tail[2][kN] = {};
  alignas(64) G grad_tail[kN] = {};
  alignas(64) Stored weight_tail[kN] = {};
  const auto copy = [rest](auto* to, const auto* from) HWY_ATTR {
    std::memcpy(static_cast<void*>(to), from, rest * sizeof(*to));
  };
  if (kMaster) copy(master_tail, master + i);
  if (kStates > 0) copy(state_tail[0], s0 + i);
  if (kStates > 1) copy(state_tail[1], s1 + i);
  if (!kMaster) copy(weight_tail, weight_bytes + i);
  copy(grad_tail, grad + i);
  update_vector<R, G, W, kMaster>(rule, multiplier, job, master_tail,
                                  static_cast<W*>(static_cast<void*>(weight_tail)), grad_tail,
                                  state_tail[0], state_tail[1],
                                  span.first_index + static_cast<uint32_t>(i), span.random_key);
  if (kMaster) copy(master + i, master_tail);
  if (kStates > 0) copy(s0 + i, state_tail[0]);
  if (kStates > 1) copy(s1 + i, state_tail[1]);
  if (!std::is_void_v<W>) copy(weight_bytes + i, weight_tail);
  if (job.clear_grads) copy(grad + i, grad_tail);
}

template <class R, typename G, typename W, bool kMaster>
void update_spans(const ApplySpan* spans, size_t count, const ApplyJob& job) {
  for (size_t i = 0; i < count; ++i) update_span<R, G, W, kMaster>(spans[i], job);
}

template <class R, typename G>
constexpr void fill(ApplyFunction (&by_kind)[kWeightKinds]) {
  by_kind[static_cast<size_t>(WeightKind::kF32)] = &update_spans<R, G, void, true>;
  by_kind[static_cast<size_t>(WeightKind::kF16Master)] = &update_spans<R, G, f16, true>;
  by_kind[static_cast<size_t>(WeightKind::kBF16Master)] = &update_spans<R, G, bf16, true>;
  by_kind[static_cast<size_t>(WeightKind::kF16)] = &update_spans<R, G, f16, false>;
  by_kind[static_cast<size_t>(WeightKind::kBF16)] = &update_spans<R, G, bf16, false>;
}

template <class R>
constexpr void fill(ApplyFunction (&by_grad)[kGradTypes][kWeightKinds]) {
  fill<R, f16>(by_grad[static_cast<size_t>(DType::kF16)]);
  fill<R, bf16>(by_grad[static_cast<size_t>(DType::kBF16)]);
  fill<R, float>(by_grad[static_cast<size_t>(DType::kF32)]);
}

const ApplyKernels* apply_kernels_for_target() {
  static constexpr ApplyKernels kKernels = [] {
    ApplyKernels kernels{};
    fill<SgdRule>(kernels.by_type[static_cast<size_t>(SgdRule::kRule)]);
    fill<SgdMomentumRule>(kernels.by_type[static_cast<size_t>(SgdMomentumRule::kRule)]);
    fill<AdamRule>(kernels.by_type[static_cast<size_t>(AdamRule::kRule)]);
    return kernels;
  }();
  return &kKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#endif  // HEADROOM_SRC_APPLY_KERNELS_INL_H_
