// The line between an optimizer's bookkeeping (fused.cc) and its kernels, one table of which exists
// per SIMD target.
#ifndef HEADROOM_SRC_APPLY_KERNELS_H_
#define HEADROOM_SRC_APPLY_KERNELS_H_

#include <headroom/tensor.h>

#include <cstddef>
#include <cstdint>

#include "apply/rules.h"

namespace headroom::internal {

/// How a parameter's weight is kept.
enum class WeightKind : uint8_t { kF32, kF16Master, kBF16Master, kF16, kBF16 };
constexpr size_t kWeightKinds = 5;
constexpr size_t kGradTypes = 3;  // f16, bf16, f32, in the order of DType

/// A piece of one parameter. All pointers are at the same element.
struct ApplySpan {
  float* master;  // the FP32 weight, or the master of a 16-bit one; null without master
  void* weight;   // the 16-bit weight; null for FP32
  void* grad;
  float* state[2];
  size_t count;
  uint32_t first_index;  // lower half of the element's index in its tensor, for random rounding
  uint32_t random_key;
  const RuleNumbers* numbers;
};

struct ApplyJob {
  bool clear_grads;
  bool stochastic_rounding;  // of bf16 weights
};

using ApplyFunction = void (*)(const ApplySpan* spans, size_t count, const ApplyJob& job);

/// The kernels of one SIMD target.
struct ApplyKernels {
  ApplyFunction by_type[kRuleCount][kGradTypes][kWeightKinds];
};

/// The kernels of the SIMD target in use.
const ApplyKernels& apply_kernels();

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_KERNELS_H_
