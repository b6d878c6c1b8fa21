// Headroom's own rule: the scale is set from the largest gradients that were measured, not searched
// for: as high as overflows are rarer than they are worth. docs/policies.md tells it in words, with
// its reasons and limits.
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
inline constexpr int32_t kShaken = 16;         // clean steps after an overflow with a bit of care
inline constexpr int32_t kTries = 8;           // of a batch, at most, where batches are run again
inline constexpr float kCustomary = 65536.0f;  // the scale that everybody starts from

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

HEADROOM_HOST_DEVICE inline int32_t exponent_of(float scale) { return floor_bits(bits_of(scale)); }

HEADROOM_HOST_DEVICE inline int32_t within(int32_t value, int32_t least, int32_t most) {
  return value < least ? least : value > most ? most : value;
}

// The largest gradient of late. Nothing measured yet: so small that any scale is right.
HEADROOM_HOST_DEVICE inline int32_t highest(const ScalePolicy& policy, const ScaleState& state) {
  if (state.samples == 0) return bits_of(policy.grad_limit) - bits_of(policy.max_scale);
  return state.peak > state.peak_before ? state.peak : state.peak_before;
}

// As too large counts what comes to a limit by the scatter, or `most`: one beyond it is near then.
HEADROOM_HOST_DEVICE inline int32_t margin(const ScalePolicy& policy, const ScaleState& state,
                                           int32_t most) {
  return within(policy.rerun ? 0 : state.scatter * 3 / 4, kBit / 64, most);
}

// The largest exponent that this gradient fits.
HEADROOM_HOST_DEVICE inline int32_t ceiling(const ScalePolicy& policy, const ScaleState& state,
                                            int32_t seen) {
  const int32_t limit = bits_of(policy.grad_limit) - margin(policy, state, kBit / 2);
  return within(floor_bits(limit - seen), -4000, 4000);
}

// Moves the range of exponents whose ages are kept. What comes into it from below was never too
// high; what comes from above always was.
HEADROOM_HOST_DEVICE inline void move_ages(int32_t lowest, ScaleState* state) {
  const int32_t by = lowest - state->lowest;
  state->lowest = lowest;
  for (int32_t k = 0; k < kLevels; ++k) {
    const int32_t i = by > 0 ? k : kLevels - 1 - k;  // never over what is still to be read
    const int32_t from = i + by;
    state->ages[i] = from < 0 ? kMaxWait : from >= kLevels ? 0 : state->ages[from];
  }
}

HEADROOM_HOST_DEVICE inline void remember(const ScalePolicy& policy, double amax,
                                          ScaleState* state) {
  constexpr int32_t kBelow = kLevels - 8;  // of the exponents kept, those below the highest in use
  const int32_t seen = bits_of(amax / static_cast<double>(state->scale));
  const bool first = state->samples == 0;
  if (first) {
    state->peak = seen;
    state->peak_before = seen;
    state->gap = 0;  // found blindly, if any
    state->lowest = ceiling(policy, *state, seen) - kBelow;
    for (int32_t& age : state->ages) age = kMaxWait;
  }
  if (state->samples < kMaxSamples) ++state->samples;
  if (seen > state->peak) state->peak = seen;
  if (++state->window >= policy.peak_window) {
    // Rises from window to window are the scatter; the largest one fades by 1/16 a window. The
    // first one has only the first step to be compared with, which says less.
    const bool first_window = state->samples <= policy.peak_window;
    const int32_t most = first_window ? kBit : 2 * kBit;
    const int32_t rise = within(state->peak - state->peak_before, 0, most);
    state->scatter -= state->scatter / 16;
    if (rise > state->scatter) state->scatter = rise;
    if (ceiling(policy, *state, state->peak) - kBelow > state->lowest) {
      move_ages(state->lowest + 1, state);
    }
    state->peak_before = state->peak;
    state->peak = seen;
    state->window = 0;
  }
  const int32_t fits = ceiling(policy, *state, seen);
  if (fits < state->lowest) move_ages(fits, state);
  for (int32_t i = 0; i < kLevels; ++i) {
    int32_t& age = state->ages[i];
    age = state->lowest + i > fits ? 0 : age < kMaxWait ? age + 1 : age;
  }
}

// The exponent with the best balance. One that has been too high `age` steps ago is taken to
// overflow once in `age` steps, and a skipped step to cost as much as one bit of scale for `price`
// steps: more where peaks scatter, because calm then says less.
HEADROOM_HOST_DEVICE inline int32_t balanced(const ScalePolicy& policy, const ScaleState& state) {
  const int32_t most = exponent_of(policy.max_scale);
  if (state.samples == 0) return most;
  const int32_t scatter = state.scatter / (kBit / 256);
  const int32_t price = within(scatter * scatter / 8, 1024, 8192);  // 8192 for a bit
  int32_t best = state.lowest;
  int32_t best_value = 0;
  for (int32_t i = 0; i < kLevels && state.ages[i] > 0; ++i) {
    const int32_t value = i * kBit - price * kBit / state.ages[i];
    if (i > 0 && value < best_value) continue;
    best = state.lowest + i;
    best_value = value;
  }
  return best < most ? best : most;
}

// The same, and no higher than backward is trusted with scaled gradients.
HEADROOM_HOST_DEVICE inline int32_t target_of(const ScalePolicy& policy, const ScaleState& state) {
  const int32_t best = balanced(policy, state);
  if (state.gap <= 0) return best + -state.gap / kBit;  // more than the limit has passed
  const int32_t trusted = bits_of(policy.grad_limit) - state.gap - margin(policy, state, kBit / 16);
  const int32_t inside = floor_bits(trusted - highest(policy, state));
  return inside < best ? inside : best;
}

// Clean steps before a growth by a bit: many above the scale that everybody starts from.
HEADROOM_HOST_DEVICE inline int32_t pause_of(const ScalePolicy& policy, bool slow) {
  return slow ? policy.growth_interval : policy.growth_interval / 256;
}

// An overflow at this exponent: if not long ago a gradient was measured that stands out and was too
// large for it, it is taken to be another one like the last of those.
HEADROOM_HOST_DEVICE inline void remember_again(const ScalePolicy& policy, int32_t failed,
                                                ScaleState* state) {
  const int32_t last = state->ages[within(failed - state->lowest, 0, kLevels - 1)];
  if (last > 4 * policy.retry_interval) return;
  int32_t fits = 0;  // exponents from `lowest` on that the last one fitted
  while (fits < kLevels && state->ages[fits] > last) ++fits;
  const int32_t usual = ceiling(policy, *state, highest(policy, *state));
  if (state->lowest + fits + 1 > usual) return;  // by two bits at least
  for (int32_t i = fits; i < kLevels; ++i) state->ages[i] = 0;
}

// A batch that is run again gets 1, 3, 6, 10, 15 and 21 bits less than at first, then the floor: by
// how many bits the last cut was if it is `below` now (near the floor at least); 0 for none.
HEADROOM_HOST_DEVICE inline int32_t last_cut(int32_t below) {
  int32_t cut = 0;
  while (cut < kTries - 2 && (cut + 1) * (cut + 2) / 2 <= below) ++cut;
  const int32_t beyond = below - cut * (cut + 1) / 2;
  return beyond > 0 && cut == kTries - 2 ? beyond : cut;
}

// The first clean step after overflows tells whether the gradients had grown, or whether backward
// overflowed on its way to gradients that look small enough. That is learnt as a gap.
HEADROOM_HOST_DEVICE inline void learn_from_failure(const ScalePolicy& policy, ScaleState* state) {
  const int32_t here = exponent_of(state->scale);
  int32_t failed = exponent_of(state->failed_scale);
  bool repeated = state->skips_in_row > 1;
  if (policy.rerun) {  // of one batch, or of bad ones, after which the scale is what it was
    failed = here + last_cut(failed - here);
    repeated = failed == here;
  }
  const bool growth_failed = state->trial_left > 0;
  const int32_t calm = state->calm;
  state->failed_scale = 0.0f;
  state->trial_left = 0;
  state->calm = 0;
  // If it failed when it had just come back, it climbs from here, bit by bit.
  const bool soon = calm < kShaken;
  if (repeated) {  // far below it failed too: come back at once only to gradients of 1
    const int32_t of_one = balanced(policy, *state) - floor_bits(bits_of(policy.grad_limit));
    state->back = soon ? here : of_one;
    return;
  }
  if (state->samples > 1) remember_again(policy, failed, state);
  const bool grown = target_of(policy, *state) < failed;
  if (state->samples == 1 && calm == 0) {
    // No clean step before: the start was too high, or backward has a limit.
    state->back = grown ? failed : here;
    return;
  }
  if (!grown && !growth_failed && calm >= policy.retry_interval / 2) {
    // Out of the blue. Once in a long while is no reason to give up a scale that works, and where
    // less did not help, even less will not.
    if (state->retry_left > policy.retry_interval) state->retry_left = policy.retry_interval;
    if (state->gap > 0 || calm >= 4 * policy.retry_interval) {
      state->back = failed;
      return;
    }
  }
  state->back = soon ? here : failed - 1;
  if (state->scatter < kBit) state->scatter = kBit;
  if (grown) return;
  const int32_t left = highest(policy, *state) + failed * kBit - kBit / 2;
  const int32_t gap = bits_of(policy.grad_limit) - left;
  state->gap = gap > 0 ? gap : 0;
  const int32_t shortest = (growth_failed ? 16 : 1) * policy.retry_interval;
  state->retry_wait = within(2 * state->retry_wait, shortest, 64 * policy.retry_interval);
  state->retry_left = state->retry_wait;
}

// Gives one bit of the gap back when its time has come.
HEADROOM_HOST_DEVICE inline void retry(const ScalePolicy& policy, ScaleState* state) {
  if (state->trial_left > 0 && --state->trial_left == 0 && state->gap <= 0) state->retry_wait = 0;
  if (state->gap <= 0 || --state->retry_left > 0) return;
  state->gap = state->gap > kBit ? state->gap - kBit : 0;
  state->retry_left = policy.retry_interval;
}

// Where batches are run again: as far down as it takes, to the floor at last. A batch that no scale
// helps is left out, and the scale is what it was.
HEADROOM_HOST_DEVICE inline float scale_for_rerun(const ScalePolicy& policy, ScaleState* state) {
  const int32_t here = exponent_of(state->scale);
  const int32_t cut = last_cut(exponent_of(state->failed_scale) - here) + 1;
  const float smaller = cut < kTries - 1 ? scale_of(policy, here - cut) : policy.min_scale;
  state->since_rescale = 0;
  state->overflows_since_rescale = 0;
  if (smaller < state->scale) return smaller;
  state->failed_scale = scale_of(policy, exponent_of(state->failed_scale));
  return state->failed_scale;
}

HEADROOM_HOST_DEVICE inline float headroom_after_overflow(const ScalePolicy& policy,
                                                          Transition* next) {
  ScaleState& state = next->state;
  ++state.skipped;
  ++state.skips_in_row;
  ++state.overflows_since_rescale;
  state.growth_tracker = 0;
  if (state.failed_scale == 0.0f) state.failed_scale = state.scale;
  if (policy.rerun) return scale_for_rerun(policy, &state);
  // A growth that failed is taken back, and a bit more. Else how far is too far is not known: go
  // deep, measure, and come back; deeper each time.
  int32_t cut = state.trial_left > 0 ? 2 : 10;
  if (state.skips_in_row > 1) cut = state.skips_in_row > 5 ? 256 : 4 << state.skips_in_row;
  const float smaller = scale_of(policy, exponent_of(state.scale) - cut);
  if (!(smaller < state.scale)) {
    next->alarm = Alarm::kAtFloor;
    return state.scale;
  }
  state.since_rescale = 0;
  state.overflows_since_rescale = 0;
  return smaller;
}

// Where batches are run again nothing is given up before it overflows. After it, half the scale
// that failed, or what passed if it fails all the time; then to the target as ever, and a bit
// beyond whenever that held for a while and would have held the last gradients.
HEADROOM_HOST_DEVICE inline float risked(const ScalePolicy& policy, float failed, bool soon,
                                         ScaleState* state) {
  const int32_t now = exponent_of(state->scale);
  int32_t next = now;
  if (failed > 0.0f) {
    if (!soon && exponent_of(failed) - 1 > now) next = exponent_of(failed) - 1;
  } else if (now < target_of(policy, *state)) {
    if (state->since_rescale >= pause_of(policy, state->scale >= kCustomary)) next = now + 1;
  } else if (state->since_rescale >= policy.retry_interval / 4) {
    const int32_t level = now + 1 - state->lowest;
    const bool fits = level < 0 || (level < kLevels && state->ages[level] > 0);
    if (fits) next = now + 1;
  }
  const float scale = scale_of(policy, next);
  if (scale != state->scale) state->since_rescale = 0;
  return scale;
}

HEADROOM_HOST_DEVICE inline float headroom_after_clean_step(const ScalePolicy& policy, double amax,
                                                            Transition* next) {
  ScaleState& state = next->state;
  constexpr double kDoubleMax = 1.7976931348623157e308;
  const bool known = amax > 0.0 && amax <= kDoubleMax;
  if (known) remember(policy, amax, &state);
  const float failed = state.failed_scale;
  const bool soon = state.calm < kShaken;
  if (failed > 0.0f) {
    learn_from_failure(policy, &state);
  } else {
    retry(policy, &state);
  }
  state.skips_in_row = 0;
  if (state.calm < kMaxWait) ++state.calm;
  const int32_t room = bits_of(policy.grad_limit) - (known ? bits_of(amax) : 0);
  if (known && room < state.gap) state.gap = room;  // what passed is trusted

  if (policy.rerun) return risked(policy, failed, soon, &state);
  const bool at_start = state.samples > 0 && state.samples - state.calm < kShaken;
  const bool shaken = state.skipped > 0 && state.calm <= kShaken && !at_start;
  const int32_t now = exponent_of(state.scale);
  const float target = scale_of(policy, target_of(policy, state) - (shaken ? 1 : 0));
  if (target < state.scale) {
    state.growth_tracker = 0;
    state.trial_left = 0;
    state.since_rescale = 0;
    return target;
  }
  // After an overflow back at once; else one bit at a time, and slowly above the scale that
  // everybody starts from.
  const bool return_now = state.calm <= 2 * kShaken && now < state.back;
  const bool slow = !return_now && state.scale >= kCustomary;
  const int32_t pause = pause_of(policy, slow);
  if (target == state.scale) return state.scale;
  if (state.growth_tracker + 1 < pause) {
    ++state.growth_tracker;
    return state.scale;
  }
  state.growth_tracker = 0;
  state.since_rescale = 0;
  state.trial_left = return_now ? 0 : policy.growth_interval;
  const float grown = scale_of(policy, return_now ? state.back : now + 1);
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
