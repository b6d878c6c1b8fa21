// Separates the bookkeeping of an optimizer (fused.cc) from its kernels: kernels-inl.h, compiled
// once per SIMD target, and cuda.cu.
#ifndef HEADROOM_SRC_APPLY_KERNELS_H_
#define HEADROOM_SRC_APPLY_KERNELS_H_

#include <headroom/tensor.h>

#include <headroom/optimizer.h>

#include <compare>
#include <cstddef>
#include <cstdint>

#include "apply/rules.h"
#include "core/element.h"

namespace headroom::internal {

/// How a parameter's weight is stored: in FP32, in 16 bits with an FP32 master, or in 16 bits only.
enum class WeightKind : uint8_t { kF32, kF16Master, kBF16Master, kF16, kBF16 };

constexpr bool has_master(WeightKind kind) {
  return kind == WeightKind::kF16Master || kind == WeightKind::kBF16Master;
}

/// Consecutive elements of one parameter. All pointers refer to the same first element.
struct ApplySpan {
  void* master;  // the FP32 weight, or the master of a 16-bit one: FP32, or the part below the
                 // weight (StateFormat); null if there is no master
  void* weight;  // the 16-bit weight; null for FP32
  void* grad;
  void* state[2];         // FP32, bf16 or MomentCode
  uint8_t* exponents[2];  // of the groups of elements, in StateFormat::kByte
  size_t count;
  uint32_t first_index;  // lower 32 bits of the element's index in its tensor, and
  uint32_t random_key;   // the key for stochastic rounding
  const RuleNumbers* numbers;
  const uint8_t* follow;  // not 0: masters follow weights that others have written, first
};

struct ApplyJob {
  bool clear_grads;
  bool stochastic_rounding;  // of bf16 weights
};

/// What selects a kernel. Jobs and launches of one kind are processed together.
struct KernelKind {
  Rule rule;
  DType grad;
  WeightKind weight;
  StateFormat state;
  auto operator<=>(const KernelKind&) const = default;
};

/// Returns pick.operator()<kRule, G, W, kMaster>() with the template arguments for a rule, a type
/// of gradients and a kind of weights. W is float for FP32 weights, which are updated through the
/// master pointer. This is the only list of kernels, for SIMD targets and for CUDA.
template <typename Pick>
auto select_kernel(Rule rule, DType grad, WeightKind kind, const Pick& pick) {
  return with_type<f16, bf16, float>(grad, [&](auto grad_element) {
    using G = decltype(grad_element);
    const auto by_kind = [&]<Rule kRule>() {
      switch (kind) {
        case WeightKind::kF16Master:
          return pick.template operator()<kRule, G, f16, true>();
        case WeightKind::kBF16Master:
          return pick.template operator()<kRule, G, bf16, true>();
        case WeightKind::kF16:
          return pick.template operator()<kRule, G, f16, false>();
        case WeightKind::kBF16:
          return pick.template operator()<kRule, G, bf16, false>();
        case WeightKind::kF32:
          break;
      }
      return pick.template operator()<kRule, G, float, true>();
    };
    if (rule == Rule::kSgd) return by_kind.template operator()<Rule::kSgd>();
    if (rule == Rule::kSgdMomentum) return by_kind.template operator()<Rule::kSgdMomentum>();
    if (rule == Rule::kLion) return by_kind.template operator()<Rule::kLion>();
    return by_kind.template operator()<Rule::kAdam>();
  });
}

using ApplyFunction = void (*)(const ApplySpan* spans, size_t count, const ApplyJob& job);

/// The kernel of this kind on the SIMD target in use.
ApplyFunction apply_function(const KernelKind& kind);
/// The same for the compact formats only (compact.cc).
ApplyFunction compact_function(const KernelKind& kind);

/// The samples of groups [first_group, end_group) of a parameter with a master, see Samples.
struct SampleSpan {
  const float* master;  // of the whole parameter
  const void* weight;
  int64_t count;
  int64_t first_group;
  int64_t end_group;
  uint64_t random_base;
  bool stochastic;  // the weight is rounded at random
};

struct FollowKernels {
  /// Whether others have written one of the sampled weights.
  bool (*samples_written)(const SampleSpan& span);
  /// Sets the masters of weights that others have written to these weights.
  void (*follow)(float* master, const void* weight, size_t count, bool stochastic);
};

/// For weights of this type, on the SIMD target in use.
FollowKernels follow_kernels(DType dtype);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_KERNELS_H_
