// Headroom's own rule: the scale is set from the largest gradient that was measured, not searched
// for. docs/policies.md tells it in words, with its reasons and limits.
//
// All of it is integers: magnitudes are log2 in units of 1/65536, straight between powers of two,
// so that hosts and devices cannot round differently and a saved state is exact.
#ifndef HEADROOM_HEADROOM_RULE_H_
#define HEADROOM_HEADROOM_RULE_H_

#include <headroom/export.h>
#include <headroom/policy.h>

#include <cstdint>
#include <cstring>

namespace headroom {
namespace internal {

inline constexpr int32_t kBit = 65536;  // one power of two
inline constexpr int32_t kMaxSamples = 1 << 30;
inline constexpr int32_t kMaxWait = 1 << 24;

// log2 of a positive finite number, rounded up. Exact for what 16-bit formats hold.
HEADROOM_HOST_DEVICE inline int32_t bits_of(double value) {
  uint64_t raw = 0;
  memcpy(&raw, &value, sizeof raw);
  constexpr int kDropped = 52 - 16;  // of the mantissa
  const auto kept = static_cast<int32_t>(raw >> kDropped);
  const bool more = (raw & ((uint64_t{1} << kDropped) - 1)) != 0;
  return kept + (more ? 1 : 0) - 1023 * kBit;
}

HEADROOM_HOST_DEVICE inline int32_t floor_bits(int32_t bits) {
  return bits >= 0 ? bits / kBit : -((-bits + kBit - 1) / kBit);
}

// 2^exponent within the policy's bounds.
HEADROOM_HOST_DEVICE inline float scale_of(const ScalePolicy& policy, int32_t exponent) {
  if (exponent <= floor_bits(bits_of(policy.min_scale))) return policy.min_scale;
  if (exponent >= floor_bits(bits_of(policy.max_scale))) return policy.max_scale;
  const auto raw = static_cast<uint32_t>(exponent + 127) << 23;
  float scale = 0.0f;
  memcpy(&scale, &raw, sizeof scale);
  return scale;
}

HEADROOM_HOST_DEVICE inline int32_t highest(const ScaleState& state) {
  return state.peak > state.peak_before ? state.peak : state.peak_before;
}

// What the largest unscaled gradient has to be expected to be: the highest of late, as much more as
// it rose in this window, and a part of how far it stands out. Where all steps are alike that is
// next to nothing more. Nothing measured yet: so small that any scale is right.
HEADROOM_HOST_DEVICE inline int32_t expected_peak(const ScalePolicy& policy,
                                                  const ScaleState& state) {
  if (state.samples == 0) return bits_of(policy.grad_limit) - bits_of(policy.max_scale);
  const int32_t peak = highest(state);
  int32_t rise = state.peak - state.peak_before;
  rise = rise < 0 ? 0 : rise > kBit / 2 ? kBit / 2 : rise;
  return peak + rise + (peak - state.mean) / 4 + kBit / 64;
}

// Backward is trusted with scaled gradients up to here.
HEADROOM_HOST_DEVICE inline int32_t trusted(const ScalePolicy& policy, const ScaleState& state) {
  return bits_of(policy.grad_limit) - state.gap;
}

HEADROOM_HOST_DEVICE inline void remember(const ScalePolicy& policy, double amax,
                                          ScaleState* state) {
  const int32_t seen = bits_of(amax / static_cast<double>(state->scale));
  if (state->samples == 0) {
    state->peak = seen;
    state->peak_before = seen;
    state->mean = seen;
    state->gap = 0;  // found blindly, if any
  }
  if (seen > state->peak) state->peak = seen;
  state->mean += (seen - state->mean) / 64;
  if (state->samples < kMaxSamples) ++state->samples;
  if (++state->window < policy.peak_window) return;
  // A peak that does not come back is forgotten by half a bit a window.
  const int32_t faded = state->peak_before - kBit / 2;
  state->peak_before = state->peak > faded ? state->peak : faded;
  state->peak = seen;
  state->window = 0;
}

// The first clean step after overflows tells whether the gradients had grown, or whether backward
// overflowed on its way to gradients that look small enough. That is learnt as a gap.
HEADROOM_HOST_DEVICE inline void learn_from_failure(const ScalePolicy& policy, ScaleState* state) {
  const int32_t failed = bits_of(state->failed_scale);
  const bool repeated = state->skips_in_row > 1;
  const bool growth_failed = state->trial_left > 0;
  const int32_t calm = state->calm;
  state->failed_scale = 0.0f;
  state->trial_left = 0;
  state->calm = 0;
  if (repeated) {  // far below it failed too: so much is not proven, and not the scale's fault
    const int32_t here = highest(*state) + bits_of(state->scale);
    const int32_t least = here > 0 ? here : 0;
    if (state->proven > least) state->proven = least;
    return;
  }
  if (state->samples > 0 && highest(*state) + failed > trusted(policy, *state)) return;
  if (!growth_failed && calm >= policy.retry_interval) {
    // Out of the blue. Once in a long while is no reason to give up a scale that works, and where
    // less did not help, even less will not.
    if (state->retry_left > policy.retry_interval) state->retry_left = policy.retry_interval;
    if (state->gap > 0 || calm >= 4 * policy.retry_interval) return;
  }
  const int32_t left = expected_peak(policy, *state) + failed - kBit / 2;
  state->gap = bits_of(policy.grad_limit) - left;
  if (state->proven > left) state->proven = left;
  state->retry_left = policy.retry_interval;
  if (!growth_failed) return;
  const int32_t shortest = 8 * policy.retry_interval, longest = 64 * policy.retry_interval;
  const int32_t doubled = 2 * state->retry_wait;
  state->retry_wait = doubled < shortest ? shortest : doubled > longest ? longest : doubled;
  state->retry_left = state->retry_wait;
}

// Gives one bit of the gap back when its time has come.
HEADROOM_HOST_DEVICE inline void retry(const ScalePolicy& policy, ScaleState* state) {
  if (state->trial_left > 0 && --state->trial_left == 0 && state->gap <= 0) state->retry_wait = 0;
  if (state->gap <= 0 || --state->retry_left > 0) return;
  state->gap = state->gap > kBit ? state->gap - kBit : 0;
  state->retry_left = policy.retry_interval;
}

HEADROOM_HOST_DEVICE inline float headroom_after_overflow(const ScalePolicy& policy,
                                                          Transition* next) {
  ScaleState& state = next->state;
  ++state.skipped;
  ++state.skips_in_row;
  ++state.overflows_since_rescale;
  state.growth_tracker = 0;
  if (state.failed_scale == 0.0f) state.failed_scale = state.scale;
  // A growth that failed is taken back, and a bit more. Else how far is too far is not known: go
  // deep, measure, and come back; deeper each time.
  int32_t cut = 2;
  if (state.trial_left == 0 || state.skips_in_row > 1) {
    cut = state.skips_in_row > 5 ? 256 : 4 << state.skips_in_row;
  }
  const float smaller = scale_of(policy, floor_bits(bits_of(state.scale)) - cut);
  if (!(smaller < state.scale)) {
    next->alarm = Alarm::kAtFloor;
    return state.scale;
  }
  state.since_rescale = 0;
  state.overflows_since_rescale = 0;
  return smaller;
}

HEADROOM_HOST_DEVICE inline float headroom_after_clean_step(const ScalePolicy& policy, double amax,
                                                            Transition* next) {
  ScaleState& state = next->state;
  constexpr double kDoubleMax = 1.7976931348623157e308;
  const bool known = amax > 0.0 && amax <= kDoubleMax;
  if (known) remember(policy, amax, &state);
  if (state.failed_scale > 0.0f) {
    learn_from_failure(policy, &state);
  } else {
    retry(policy, &state);
  }
  state.skips_in_row = 0;
  if (state.calm < kMaxWait) ++state.calm;
  if (known) {  // what passed is proven, and trusted
    const int32_t passed = bits_of(amax);
    if (passed > state.proven) state.proven = passed;
    if (passed > trusted(policy, state)) state.gap = bits_of(policy.grad_limit) - passed;
  }

  const int32_t expected = expected_peak(policy, state);
  const int32_t level = trusted(policy, state);
  const float target = scale_of(policy, floor_bits(level - expected));
  if (target < state.scale) {
    state.growth_tracker = 0;
    state.trial_left = 0;
    state.since_rescale = 0;
    return target;
  }
  // Back to what is proven at once; beyond it one bit at a time, and slowly above the scale that
  // everybody starts from.
  constexpr float kCustomary = 65536.0f;
  const int32_t doubled = floor_bits(bits_of(state.scale)) + 1;
  const int32_t back = floor_bits(state.proven - highest(state));
  const bool beyond = doubled > back;
  const bool slow = beyond && state.scale >= kCustomary;
  const int32_t pause = slow ? policy.growth_interval : policy.growth_interval / 256;
  if (target == state.scale || state.growth_tracker + 1 < pause) {
    if (state.growth_tracker + 1 < policy.growth_interval) ++state.growth_tracker;
    return state.scale;
  }
  state.growth_tracker = 0;
  state.since_rescale = 0;
  state.trial_left = beyond ? policy.retry_interval : 0;
  const float grown = scale_of(policy, beyond ? doubled : back);
  return grown < target ? grown : target;
}

HEADROOM_HOST_DEVICE inline float headroom_rule(const ScalePolicy& policy, const StepSeen& seen,
                                                Transition* next) {
  return seen.overflow ? headroom_after_overflow(policy, next)
                       : headroom_after_clean_step(policy, seen.amax, next);
}

}  // namespace internal
}  // namespace headroom

#endif  // HEADROOM_HEADROOM_RULE_H_
