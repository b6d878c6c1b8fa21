// apply/ updates weights, in one pass over memory; it knows nothing of policies. This header says
// what an update rule is: settings from the user, and the numbers a kernel needs for one step.
#ifndef HEADROOM_SRC_APPLY_RULES_H_
#define HEADROOM_SRC_APPLY_RULES_H_

#include <headroom/float16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace headroom::internal {

enum class Rule : uint8_t { kSgd, kSgdMomentum, kAdam };
constexpr size_t kRuleCount = 3;

/// FP32 buffers of a parameter's state under a rule, and their names in a saved state.
constexpr size_t state_buffers(Rule rule) { return static_cast<size_t>(rule); }
constexpr const char* state_name(Rule rule, size_t buffer) {
  if (rule == Rule::kSgdMomentum) return "momentum";
  return buffer == 0 ? "exp_avg" : "exp_avg_sq";
}

/// The options of one group, as the rule sees them.
struct RuleSettings {
  Rule rule = Rule::kSgd;
  bool nesterov = false;   // SGD
  bool decoupled = false;  // AdamW's weight decay
  double lr = 0.0;
  double weight_decay = 0.0;
  double momentum = 0.0;   // SGD
  double dampening = 0.0;  // SGD
  double beta1 = 0.0;      // Adam
  double beta2 = 0.0;      // Adam
  double eps = 0.0;        // Adam

  bool operator==(const RuleSettings&) const = default;
};

/// What a kernel multiplies by in one step. Computed in double, rounded once.
struct RuleNumbers {
  float multiplier;  // unscale and clip
  float l2;          // weight decay that goes through the gradient
  // Adam
  float keep;        // 1 - lr x decoupled weight decay
  float beta1_rest;  // 1 - beta1
  float beta2;
  float beta2_rest;   // 1 - beta2
  float correction2;  // 1 / sqrt(1 - beta2^t)
  float step_size;    // lr / (1 - beta1^t)
  float eps;
  // SGD
  float lr;
  float momentum;
  float damped;     // 1 - dampening; 1 in the first step
  float from_grad;  // the update is from_grad x gradient + from_buffer x momentum buffer
  float from_buffer;
};

/// x^n for x from 0 to 1, by multiplications alone, so that every machine gives the same bits.
HEADROOM_HOST_DEVICE inline double power(double x, int64_t n) {
  double result = 1.0;
  for (; n > 0; n /= 2) {
    if (n % 2 != 0) result *= x;
    x *= x;
  }
  return result;
}

/// The numbers of a parameter's next step, after `steps` applied ones.
HEADROOM_HOST_DEVICE inline RuleNumbers rule_numbers(const RuleSettings& settings, int64_t steps,
                                                     float multiplier) {
  RuleNumbers n{};
  n.multiplier = multiplier;
  n.l2 = settings.decoupled ? 0.0f : static_cast<float>(settings.weight_decay);
  n.lr = static_cast<float>(settings.lr);
  if (settings.rule == Rule::kAdam) {
    const double decay = settings.lr * settings.weight_decay;
    n.keep = settings.decoupled ? static_cast<float>(1.0 - decay) : 1.0f;
    n.beta1_rest = static_cast<float>(1.0 - settings.beta1);
    n.beta2 = static_cast<float>(settings.beta2);
    n.beta2_rest = static_cast<float>(1.0 - settings.beta2);
    const double rest1 = 1.0 - power(settings.beta1, steps + 1);
    const double rest2 = 1.0 - power(settings.beta2, steps + 1);
    n.correction2 = static_cast<float>(1.0 / std::sqrt(rest2));
    n.step_size = static_cast<float>(settings.lr / rest1);
    n.eps = static_cast<float>(settings.eps);
  } else {
    n.momentum = static_cast<float>(settings.momentum);
    n.damped = steps == 0 ? 1.0f : static_cast<float>(1.0 - settings.dampening);
    n.from_grad = settings.nesterov ? 1.0f : 0.0f;
    n.from_buffer = settings.nesterov ? n.momentum : 1.0f;
  }
  return n;
}

/// A float rounded to bf16 up or down at random, by the element's index and a key: the reference of
/// what the kernels do.
HEADROOM_HOST_DEVICE inline bf16 round_stochastic(float value, uint32_t index, uint32_t key) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bf16(value);  // NaN
  uint32_t x = index ^ key;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return bf16::from_bits(static_cast<uint16_t>((bits + (x >> 16)) >> 16));
}

/// Mixes well, so that neighbouring inputs are unrelated.
HEADROOM_HOST_DEVICE inline uint64_t mix(uint64_t x, uint64_t part) {
  x = (x ^ part) + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// What the random rounding of a parameter's elements depends on, beside the element: the seed, the
/// parameter, and the number of steps applied before.
HEADROOM_HOST_DEVICE inline uint64_t random_base(uint64_t seed, size_t parameter, int64_t steps) {
  return mix(mix(seed, static_cast<uint64_t>(parameter)), static_cast<uint64_t>(steps));
}

/// The key of round_stochastic for the element at `index`.
HEADROOM_HOST_DEVICE inline uint32_t random_key_at(uint64_t base, uint64_t index) {
  return static_cast<uint32_t>(mix(base, index >> 32));
}

/// Throws unless every option is possible.
void validate(const RuleSettings& settings);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_RULES_H_
