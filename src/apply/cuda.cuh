// What the kernels of apply/ share: the arithmetic of the rules, the pieces that blocks process,
// and the preparation of a step on the device, as part of the kernel that decides on it.
#ifndef HEADROOM_SRC_APPLY_CUDA_CUH_
#define HEADROOM_SRC_APPLY_CUDA_CUH_

#include "apply/cuda.h"

namespace headroom::internal {

/// One block of a step kernel processes one piece.
constexpr int kStepThreads = 256;
constexpr int kPiece = 2048;  // elements

using StepKernel = void (*)(CudaTables tables, int64_t last_piece, ApplyJob job,
                            bool clear_skipped);

/// The step kernel for StateFormat::kHalf and kByte (compact.cu), of blocks with kCompactThreads.
constexpr int kCompactThreads = 128;
StepKernel compact_step_kernel(const KernelKind& kind);

/// The square root of x from 2^-96 to 2^126, and 1 / x for x from 2^-126 to 2^126, rounded to
/// nearest: the usual instructions without the branch for other numbers. Checked for all of them on
/// sm_90.
__device__ inline float ordinary_sqrt(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  const float root = x * r;
  return __fmaf_rn(__fmaf_rn(-root, root, x), 0.5f * r, root);
}
__device__ inline float ordinary_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

/// The rules, with the same operations in the same order as update-inl.h. The files are compiled
/// with --fmad=false, so that the results are the same bits as on the CPU. kCompact: see
/// RuleNumbers; the caller adds the weight decay of l2.
template <Rule kRule, bool kCompact>
__device__ inline float updated(const RuleNumbers& n, float g, float w, float* s0, float* s1) {
  if constexpr (!kCompact) g = g + n.l2 * w;
  if constexpr (kRule == Rule::kSgd) {
    return w - n.lr * g;
  } else if constexpr (kRule == Rule::kSgdMomentum) {
    const float b = n.momentum * *s0 + n.damped * g;
    *s0 = b;
    return w - n.lr * (n.from_grad * g + n.from_buffer * b);
  } else if constexpr (kRule == Rule::kLion) {
    const float mixed = n.beta1 * *s0 + n.beta1_rest * g;
    *s0 = n.beta2 * *s0 + n.beta2_rest * g;
    const float step = mixed == 0.0f ? 0.0f : copysignf(n.lr, mixed);
    return n.keep * w - step;
  } else {
    const float m = *s0 + n.beta1_rest * (g - *s0);
    const float v = n.beta2 * *s1 + n.beta2_rest * (g * g);
    *s0 = m;
    *s1 = v;
    const float root = kCompact ? ordinary_sqrt(fmaxf(v, kSmallestVariance)) : sqrtf(v);
    const float denominator = root + n.eps;
    const float direction = kCompact ? m * ordinary_reciprocal(denominator) : m / denominator;
    return n.keep * w - n.step_size * direction;
  }
}

/// Threads that prepare a step: the first ones of a single block, which may have more for other
/// work.
constexpr unsigned kPrepareThreads = 512;

/// Computes the numbers of the next step of each slot.
__device__ inline void prepare_numbers(const CudaTables& tables) {
  for (uint32_t i = threadIdx.x; i < tables.slot_count; i += kPrepareThreads) {
    const CudaSlot& slot = tables.slots[i];
    if (slot.grad == nullptr) continue;
    const int64_t steps = tables.steps[slot.parameter];
    const uint64_t base = random_base(tables.seed, slot.parameter, steps);
    tables.numbers[i] = {rule_numbers(tables.groups[slot.group], steps, 0.0f), base,
                         random_key_at(base, 0), false};
  }
}

/// Publishes the verdict for the step kernels and, if the step is applied, counts it. Must not run
/// before prepare_numbers() has read the step counts: synchronise the block in between.
__device__ inline void prepare_verdict(const CudaTables& tables, const DeviceVerdict& verdict) {
  if (threadIdx.x == 0 && tables.verdict != nullptr) *tables.verdict = verdict;
  for (uint32_t i = threadIdx.x; i < tables.slot_count && verdict.apply; i += kPrepareThreads) {
    const CudaSlot& slot = tables.slots[i];
    if (slot.grad != nullptr) ++tables.steps[slot.parameter];
  }
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CUDA_CUH_
