// apply/ contains the optimizers: one pass over memory unscales, clips, updates and writes back. It
// must not know about policies or how the scale is chosen.
//
// This header defines the update rules: the settings of a group, and the numbers that a kernel
// needs for one step. It is shared by the CPU kernels and by CUDA.
#ifndef HEADROOM_SRC_APPLY_RULES_H_
#define HEADROOM_SRC_APPLY_RULES_H_

#include <headroom/float16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace headroom::internal {

enum class Rule : uint8_t { kSgd, kSgdMomentum, kAdam, kLion };

/// Number of state buffers of a parameter, and their names in a saved state.
constexpr size_t state_buffers(Rule rule) {
  if (rule == Rule::kSgd) return 0;
  return rule == Rule::kAdam ? 2 : 1;
}
constexpr const char* state_name(Rule rule, size_t buffer) {
  if (rule == Rule::kSgdMomentum) return "momentum";
  return buffer == 0 ? "exp_avg" : "exp_avg_sq";
}

/// The options of one group. Those of other rules are 0.
struct RuleSettings {
  Rule rule = Rule::kSgd;
  bool nesterov = false;   // SGD
  bool decoupled = false;  // weight decay of AdamW and Lion
  double lr = 0.0;
  double weight_decay = 0.0;
  double momentum = 0.0;   // SGD
  double dampening = 0.0;  // SGD
  double beta1 = 0.0;      // Adam, Lion
  double beta2 = 0.0;      // Adam, Lion
  double eps = 0.0;        // Adam

  bool operator==(const RuleSettings&) const = default;
};

/// The coefficients of one step. Each is computed in double and rounded once. With the weight w,
/// the gradient g (x multiplier + l2 x w) and the state buffers b, m and v, a step computes
///
///     SGD       w -= lr x g
///     momentum  b = momentum x b + damped x g
///               w -= lr x (from_grad x g + from_buffer x b)
///     Adam      m += beta1_rest x (g - m)
///               v = beta2 x v + beta2_rest x g x g
///               w = keep x w - step_size x m / (sqrt(v) + eps)
///               with compact state (StateFormat), which GPUs compute faster:
///               w = keep x w - step_size x (m x (1 / (sqrt(max(v, 2^-96)) + eps)))
///     Lion      w = keep x w - lr x sign(beta1 x m + beta1_rest x g)
///               m = beta2 x m + beta2_rest x g
///
/// With compact state an l2 of 0 is not added.
struct RuleNumbers {
  float multiplier;  // unscales and clips the gradient
  float l2;          // weight decay that is added to the gradient
  // Adam and Lion
  float keep;  // 1 - lr x decoupled weight decay
  float beta1;
  float beta1_rest;  // 1 - beta1
  float beta2;
  float beta2_rest;  // 1 - beta2
  // Adam, with the square root of 1 - beta2^t as a factor: sqrt(v) is divided by it
  float step_size;  // lr / (1 - beta1^t) x factor
  float eps;        // x factor
  // SGD and Lion
  float lr;
  float momentum;
  float damped;     // 1 - dampening; 1 in the first step
  float from_grad;  // the update is from_grad x gradient + from_buffer x momentum buffer
  float from_buffer;
};

constexpr float kSmallestVariance = 0x1p-96f;

/// x^n for x from 0 to 1, by repeated squaring. std::pow() is not used: it gives different bits on
/// different platforms and on GPUs.
HEADROOM_HOST_DEVICE inline double power(double x, int64_t n) {
  double result = 1.0;
  for (; n > 0; n /= 2) {
    if (n % 2 != 0) result *= x;
    x *= x;
  }
  return result;
}

/// The numbers of a parameter's next step, after `steps` applied steps.
HEADROOM_HOST_DEVICE inline RuleNumbers rule_numbers(const RuleSettings& settings, int64_t steps,
                                                     float multiplier) {
  RuleNumbers n{};
  n.multiplier = multiplier;
  n.l2 = settings.decoupled ? 0.0f : static_cast<float>(settings.weight_decay);
  n.lr = static_cast<float>(settings.lr);
  const double decay = settings.lr * settings.weight_decay;
  n.keep = settings.decoupled ? static_cast<float>(1.0 - decay) : 1.0f;
  n.beta1 = static_cast<float>(settings.beta1);
  n.beta1_rest = static_cast<float>(1.0 - settings.beta1);
  n.beta2 = static_cast<float>(settings.beta2);
  n.beta2_rest = static_cast<float>(1.0 - settings.beta2);
  if (settings.rule == Rule::kAdam) {
    const double rest1 = 1.0 - power(settings.beta1, steps + 1);
    const double factor = std::sqrt(1.0 - power(settings.beta2, steps + 1));
    n.step_size = static_cast<float>(settings.lr / rest1 * factor);
    n.eps = static_cast<float>(settings.eps * factor);
  } else {
    n.momentum = static_cast<float>(settings.momentum);
    n.damped = steps == 0 ? 1.0f : static_cast<float>(1.0 - settings.dampening);
    n.from_grad = settings.nesterov ? 1.0f : 0.0f;
    n.from_buffer = settings.nesterov ? n.momentum : 1.0f;
  }
  return n;
}

/// 32 random bits of an element: a hash of its index and the key of its tensor and step (see
/// random_key_at()).
HEADROOM_HOST_DEVICE inline uint32_t random_word(uint32_t index, uint32_t key) {
  uint32_t x = index ^ key;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

/// Rounds to bf16, up or down at random with the right mean: adds 16 random bits below the part
/// that is kept. The reference for the kernels.
HEADROOM_HOST_DEVICE inline bf16 round_stochastic(float value, uint32_t index, uint32_t key) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bf16(value);  // NaN
  return bf16::from_bits(static_cast<uint16_t>((bits + (random_word(index, key) >> 16)) >> 16));
}

/// Whether the weight is a rounding of its master: `nearest`, or with stochastic rounding of bf16
/// either neighbour. If it is not, others have written it, and the master has to follow.
HEADROOM_HOST_DEVICE inline bool came_from(float master, uint16_t weight, uint16_t nearest,
                                           bool stochastic) {
  if (weight == nearest || !stochastic) return weight == nearest;
  const uint32_t bits = float_bits(master);
  const uint32_t down = bits >> 16;
  return (bits & 0xffffu) != 0 && (weight == down || weight == down + 1);
}

/// One round of SplitMix64: neighbouring inputs give unrelated results.
HEADROOM_HOST_DEVICE inline uint64_t mix(uint64_t x, uint64_t part) {
  x = (x ^ part) + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// A hash of the seed, the parameter and the steps applied before: everything but the element that
/// stochastic rounding depends on.
HEADROOM_HOST_DEVICE inline uint64_t random_base(uint64_t seed, size_t parameter, int64_t steps) {
  return mix(mix(seed, static_cast<uint64_t>(parameter)), static_cast<uint64_t>(steps));
}

/// The key of random_word() for the element at `index`. The hash there uses the lower 32 bits
/// of the index; the upper ones are part of the key.
HEADROOM_HOST_DEVICE inline uint32_t random_key_at(uint64_t base, uint64_t index) {
  return static_cast<uint32_t>(mix(base, index >> 32));
}

/// A step notices weights that others have written since the last one, by comparing weights with
/// masters before the update. Comparing all would cost 7 % of its memory accesses on a GPU and up
/// to 10 % of its time on a CPU. Instead it looks at kSize consecutive elements, at a random place,
/// of every kGroup. If one of them was written, all elements of this parameter are compared; those
/// of parameters with up to kWhole elements always are. So every change of 2 x kGroup consecutive
/// elements is noticed: they contain a whole group.
template <int64_t kGroupSize, int64_t kSampleSize, int64_t kWholeSize>
struct Samples {
  static constexpr int64_t kGroup = kGroupSize;
  static constexpr int64_t kSize = kSampleSize;
  static constexpr int64_t kWhole = kWholeSize;

  /// The number of groups in a parameter of `count` elements.
  HEADROOM_HOST_DEVICE static int64_t groups(int64_t count) {
    return (count + kGroup - 1) / kGroup;
  }

  /// The first element of the sample of a group. `base`: see random_base(); every step looks at
  /// other places.
  HEADROOM_HOST_DEVICE static int64_t place(uint64_t base, int64_t group, int64_t count) {
    const int64_t first = group * kGroup;
    const int64_t size = count - first < kGroup ? count - first : kGroup;
    const auto places = static_cast<uint32_t>((size + kSize - 1) / kSize);
    const auto random = static_cast<uint32_t>(mix(base, static_cast<uint64_t>(group)));
    return first + static_cast<int64_t>(random % places) * kSize;
  }
};

/// On a CPU a sample costs two page walks, whatever its size: these take 1 % of a step of AdamW
/// without huge pages. On a GPU only the bytes count.
using CpuSamples = Samples<16384, 64, 8192>;
using CudaSamples = Samples<2048, 16, 2048>;

/// Throws Error(kInvalidArgument) if an option is out of range.
void validate(const RuleSettings& settings);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_RULES_H_
