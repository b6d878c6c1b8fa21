// Separates the bookkeeping of an optimizer (fused.cc) from its kernels: kernels-inl.h, compiled
// once per SIMD target, and cuda.cu.
#ifndef HEADROOM_SRC_APPLY_KERNELS_H_
#define HEADROOM_SRC_APPLY_KERNELS_H_

#include <headroom/optimizer.h>
#include <headroom/tensor.h>

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

/// The arrays that an optimizer updates besides weight and gradient, in the types of their
/// StateFormat (formats.h). Null if there is none.
struct StateArrays {
  void* master = nullptr;  // the FP32 weight, or the master of a 16-bit one: FP32, or the part of
                           // it below the weight
  void* moments[2] = {nullptr, nullptr};
  uint8_t* exponents[2] = {nullptr, nullptr};  // of groups of moments, in StateFormat::kByte
  bool operator==(const StateArrays&) const = default;
};

/// Consecutive elements of one parameter. All pointers refer to the same first element.
struct ApplySpan {
  StateArrays state;
  void* weight;  // the 16-bit weight; null for FP32
  void* grad;
  DType grad_type;
  size_t count;
  uint32_t first_index;  // lower 32 bits of the element's index in its tensor, and
  uint32_t random_key;   // the key for rounding at random
  const RuleNumbers* numbers;
  const uint8_t* follow;  // not 0: masters follow weights that others have written, first
};

struct ApplyJob {
  bool clear_grads;
  bool stochastic_rounding;  // of bf16 weights
};

/// What selects a kernel. Jobs and launches of one kind are processed together.
struct KernelKind {
  Rule rule = Rule::kSgd;
  DType grad = DType::kF32;
  WeightKind weight = WeightKind::kF32;
  StateFormat state = StateFormat::kFull;
  auto operator<=>(const KernelKind&) const = default;
};

/// Bytes of an element of a moment, and of the master of a 16-bit weight.
constexpr size_t state_bytes(StateFormat format) {
  return format == StateFormat::kFull ? 4 : format == StateFormat::kHalf ? 2 : 1;
}

/// Returns pick.operator()<kRule>().
template <typename Pick>
auto select_rule(Rule rule, const Pick& pick) {
  if (rule == Rule::kSgd) return pick.template operator()<Rule::kSgd>();
  if (rule == Rule::kSgdMomentum) return pick.template operator()<Rule::kSgdMomentum>();
  if (rule == Rule::kLion) return pick.template operator()<Rule::kLion>();
  return pick.template operator()<Rule::kAdam>();
}

/// Returns pick.operator()<kRule, G, W, kMaster>() with the template arguments for a rule, a type
/// of gradients and a kind of weights. W is float for FP32 weights, which are updated through the
/// master pointer. This is the only list of kernels of StateFormat::kFull, for SIMD targets and for
/// CUDA.
template <typename Pick>
auto select_kernel(const KernelKind& kind, const Pick& pick) {
  return with_type<f16, bf16, float>(kind.grad, [&](auto grad_element) {
    using G = decltype(grad_element);
    return select_rule(kind.rule, [&]<Rule kRule>() {
      switch (kind.weight) {
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
    });
  });
}

/// Returns pick.operator()<kRule, W, kFormat>(): the list of kernels of the other formats, which
/// take gradients of any type. W is float for FP32 weights.
template <typename Pick>
auto select_compact_kernel(const KernelKind& kind, const Pick& pick) {
  return select_rule(kind.rule, [&]<Rule kRule>() {
    const auto by_weight = [&]<StateFormat kFormat>() {
      if (kind.weight == WeightKind::kF16Master) {
        return pick.template operator()<kRule, f16, kFormat>();
      }
      if (kind.weight == WeightKind::kBF16Master) {
        return pick.template operator()<kRule, bf16, kFormat>();
      }
      return pick.template operator()<kRule, float, kFormat>();
    };
    return kind.state == StateFormat::kByte ? by_weight.template operator()<StateFormat::kByte>()
                                            : by_weight.template operator()<StateFormat::kHalf>();
  });
}

using ApplyFunction = void (*)(const ApplySpan* spans, size_t count, const ApplyJob& job);

/// The kernel of this kind on the SIMD target in use.
ApplyFunction apply_function(const KernelKind& kind);

/// The same for StateFormat::kHalf and kByte only (compact.cc).
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
