// A model of StateFormat::kHalf and kByte in double arithmetic, one parameter at a time: what the
// kernels have to compute, to the bit. Only the random bits come from the library.
#ifndef HEADROOM_TESTS_APPLY_COMPACT_MODEL_H_
#define HEADROOM_TESTS_APPLY_COMPACT_MODEL_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "apply/formats.h"
#include "apply/rules.h"
#include "tests/support.h"

namespace headroom {

/// The exponent e with 2^e <= x < 2^(e+1).
inline int exponent_of(double x) { return std::ilogb(x); }

/// |x| as a multiple of `unit`, rounded down after adding a dither of `bits` bits.
inline double whole_units(double x, double unit, uint32_t dither, int bits) {
  return std::floor(std::fabs(x) / unit + std::ldexp(dither, -bits)) * unit;
}

/// The exponent of a group of moments: of the largest, or one more where that can be rounded up.
inline int group_exponent(const std::vector<float>& values, size_t begin, size_t end) {
  float largest = 0.0f;
  for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(values[i]));
  if (largest == 0.0f) return -1000;
  const int exponent = exponent_of(largest);
  // The largest dither is 2^-20 less than a unit, an eighth of the power of two.
  const double highest = largest + std::ldexp(std::ldexp(1.0, 20) - 1, exponent - 23);
  return highest >= std::ldexp(1.0, exponent + 1) ? exponent + 1 : exponent;
}

inline float model_first(float x, int group, uint32_t dither) {
  const int exponent = std::max(group, 18 - 127);
  if (x == 0.0f) return x;
  const int lowest = exponent - 14;  // of normal numbers
  double magnitude = std::fabs(x);
  const int own = std::max(exponent_of(magnitude), lowest);
  if (magnitude < std::ldexp(1.0, lowest)) {  // a float has 23 bits below the lowest normal number
    magnitude = std::ldexp(std::nearbyint(std::ldexp(magnitude, 23 - lowest)), lowest - 23);
  }
  const double rounded = whole_units(magnitude, std::ldexp(1.0, own - 3), dither, 20);
  return static_cast<float>(std::copysign(rounded, x));
}

inline float model_second(float x, int group, uint32_t dither) {
  if (group == -1000) return 0.0f;
  const int exponent = std::max(group, 32 - 127);
  const double lowest = std::ldexp(1.0, exponent - 31);
  if (x < lowest * 0.5) return static_cast<float>(lowest);
  const int own = exponent_of(x);
  const double rounded = whole_units(x, std::ldexp(1.0, own - 3), dither, 20);
  return static_cast<float>(std::max(rounded, lowest));
}

/// A moment in bf16.
inline float model_half(float x, uint32_t dither) {
  if (x == 0.0f) return x;
  const int own = std::max(exponent_of(std::fabs(x)), -126);
  const double rounded = whole_units(x, std::ldexp(1.0, own - 7), dither, 16);
  return static_cast<float>(std::copysign(rounded, x));
}

/// A master with `below` bits below those of a W: f16 has 10 bits and exponents from -14 on.
template <typename W>
float model_master(float x, int below, uint32_t dither) {
  constexpr bool kHalf = std::is_same_v<W, f16>;
  if (x == 0.0f || (!kHalf && below == 16)) return x;
  const int lowest = kHalf ? -14 : -126, mantissa = (kHalf ? 10 : 7) + below;
  double magnitude = std::fabs(x);
  const int own = std::max(exponent_of(magnitude), lowest);
  if (kHalf && below == 8 && own == lowest && magnitude < std::ldexp(1.0, lowest)) {
    magnitude = std::ldexp(std::nearbyint(std::ldexp(magnitude, 23 - lowest)), lowest - 23);
  }
  const int dropped = std::max(0, 23 - mantissa);
  const double rounded = whole_units(magnitude, std::ldexp(1.0, own - mantissa), dither, dropped);
  return static_cast<float>(std::copysign(rounded, x));
}

/// The weight of a master: to nearest, ties away from zero.
template <typename W>
float model_weight(float master) {
  if (master == 0.0f) return master;
  constexpr bool kHalf = std::is_same_v<W, f16>;
  const int own = std::max(exponent_of(std::fabs(master)), kHalf ? -14 : -126);
  const double unit = std::ldexp(1.0, own - (kHalf ? 10 : 7));
  const double rounded = std::floor(std::fabs(master) / unit + 0.5) * unit;
  if (kHalf && rounded > 65504.0) return std::copysign(kInf, master);
  return static_cast<float>(std::copysign(rounded, master));
}

/// One parameter with weights of type W (float: without masters).
template <typename W>
struct CompactModel {
  std::vector<float> masters, first, second;  // as the format holds them
  StateFormat format = StateFormat::kByte;
  internal::RuleSettings settings;
  int64_t steps = 0;

  template <typename G>
  void step(const std::vector<G>& grads, float multiplier, size_t parameter, uint64_t seed) {
    using internal::Rule;
    const internal::RuleNumbers n = internal::rule_numbers(settings, steps, multiplier);
    for (size_t i = 0; i < masters.size(); ++i) {
      float g = static_cast<float>(grads[i]) * n.multiplier;
      float& w = masters[i];
      if (n.l2 != 0.0f) g = g + n.l2 * w;
      if (settings.rule == Rule::kSgd) {
        w = w - n.lr * g;
      } else if (settings.rule == Rule::kSgdMomentum) {
        first[i] = n.momentum * first[i] + n.damped * g;
        w = w - n.lr * (n.from_grad * g + n.from_buffer * first[i]);
      } else if (settings.rule == Rule::kLion) {
        const float mixed = n.beta1 * first[i] + n.beta1_rest * g;
        first[i] = n.beta2 * first[i] + n.beta2_rest * g;
        w = n.keep * w - (mixed == 0.0f ? 0.0f : std::copysign(n.lr, mixed));
      } else {
        first[i] = first[i] + n.beta1_rest * (g - first[i]);
        second[i] = n.beta2 * second[i] + n.beta2_rest * (g * g);
        const float root = std::sqrt(std::max(second[i], 0x1p-96f));
        const float reciprocal = 1.0f / (root + n.eps);
        w = n.keep * w - n.step_size * (first[i] * reciprocal);
      }
    }
    round(internal::random_key_at(internal::random_base(seed, parameter, steps), 0));
    ++steps;
  }

 private:
  void round(uint32_t key) {
    const bool byte = format == StateFormat::kByte;
    const size_t buffers = internal::state_buffers(settings.rule);
    for (size_t begin = 0; begin < masters.size(); begin += 32) {
      const size_t end = std::min(masters.size(), begin + 32);
      const int e1 = buffers > 0 ? group_exponent(first, begin, end) : 0;
      const int e2 = buffers > 1 ? group_exponent(second, begin, end) : 0;
      for (size_t i = begin; i < end; ++i) {
        const uint32_t word = internal::dither_word(static_cast<uint32_t>(i), key);
        const uint32_t dither20 = word >> 12, dither16 = word >> 16;
        if (buffers > 0) {
          first[i] = byte ? model_first(first[i], e1, dither20) : model_half(first[i], dither16);
        }
        if (buffers > 1) {
          second[i] =
              byte ? model_second(second[i], e2, dither20) : model_half(second[i], dither16);
        }
        if constexpr (!std::is_same_v<W, float>) {
          const uint32_t dither = word >> (std::is_same_v<W, f16> ? 27 : 24);  // 5 and 8 bits
          masters[i] = model_master<W>(masters[i], byte ? 8 : 16, byte ? dither : 0);
        }
      }
    }
  }
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_APPLY_COMPACT_MODEL_H_
