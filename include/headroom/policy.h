// decide: how the scale moves. One rule with settings, a table of presets that reproduce the
// scalers people know, and nothing that touches a tensor. All of it is plain arithmetic on plain
// structs, so that the same source runs on the host and inside CUDA kernels.
#ifndef HEADROOM_POLICY_H_
#define HEADROOM_POLICY_H_

#include <headroom/export.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace headroom {

/// The widest range a scale may ever have: there both the scale and its reciprocal are normal
/// floats, so that multiplying and dividing by a power of two is exact and nothing turns 0 or inf.
inline constexpr float kSmallestScale = 0x1p-126f;
inline constexpr float kLargestScale = 0x1p126f;

enum class OnOverflow : uint8_t {
  kSkip,   // skip the step and go on
  kThrow,  // skip the step, then throw Error(kOverflow) from step()
};

/// How the scale moves. The members' defaults are Headroom's own dynamic scaling; preset() gives
/// the settings of other systems. docs/policies.md states the rule in full.
struct ScalePolicy {
  bool dynamic = true;  // false: the scale never moves by itself
  float init_scale = 65536.0f;
  double growth_factor = 2.0;      // > 1
  double backoff_factor = 0.5;     // between 0 and 1
  int32_t growth_interval = 2000;  // clean steps in a row before the scale grows
  float min_scale = 1.0f;
  float max_scale = 16777216.0f;  // 2^24

  /// Clean steps needed on top of growth_interval: before the first growth after the start or an
  /// overflow, and before a growth that follows another growth.
  int32_t first_growth_extra = 0;
  int32_t next_growth_extra = 0;

  /// Delay: the scale shrinks on the `hysteresis`-th overflow; those before it only skip. 1: at
  /// once. What brings the whole delay back, after it is used up:
  int32_t hysteresis = 1;
  bool refill_on_growth = true;
  bool refill_on_clean = false;
  bool refill_on_shrink = false;

  /// An overflow shrinks the scale only if at least this share of the steps since the scale last
  /// moved have overflowed. 0: every overflow does.
  double tolerance = 0.0;

  /// A new scale comes into force one step late, as in MXNet.
  bool late = false;

  /// The scale must stay above min_scale instead of stopping at it, as in fairseq: a shrink that
  /// would reach it leaves the scale where it is.
  bool stay_above_min = false;

  OnOverflow on_overflow = OnOverflow::kSkip;

  /// Alarm when this many steps in a row have been skipped. 0: no such alarm, but the one at the
  /// floor, which is always on. With `rerun` passes are counted, 0 means 32, which is four batches,
  /// and there is no alarm at the floor.
  int64_t max_skips_in_row = 0;

  /// Above 0: Headroom's rule (docs/policies.md): the scale is set from the gradients' largest
  /// magnitude, which is kept below this, the largest number their format holds. Bounds and
  /// init_scale are then powers of two, growth_interval is the pause before each growth above
  /// 2^16 (below, a 256th of it), and what sets factors, delay, tolerance and lateness is left
  /// alone. 0: the rule of the settings above.
  double grad_limit = 0.0;
  int32_t peak_window = 256;      // steps whose peaks are compared with those of the steps before
  int32_t retry_interval = 2000;  // clean steps before a gap that was learnt is tried again

  /// With a grad_limit: the batch of a skipped step is run again, at the scale that update() has
  /// set for it (GradScaler::run_again). An overflow then costs a few passes and no batch, and
  /// the rule takes more risks. For one optimizer in each round, and not for GradAccumulator.
  bool rerun = false;
};

/// Headroom's own dynamic scaling: 2^16, x2 after 2000 clean steps, x1/2 on overflow, 1 to 2^24.
using DynamicScale = ScalePolicy;

/// A constant scale. An overflow still skips the step (or throws, by choice).
struct StaticScale {
  float scale = 1024.0f;
  OnOverflow on_overflow = OnOverflow::kSkip;
  int64_t max_skips_in_row = 100;

  HEADROOM_API operator ScalePolicy() const;  // NOLINT: meant to be implicit
};

/// Headroom's rule: the scale follows the largest gradient, as high as it is safe.
struct HeadroomScale {
  double grad_limit = 65504.0;  // FP16's largest number
  float init_scale = 65536.0f;
  float min_scale = 0x1p-24f;
  float max_scale = 0x1p32f;
  int32_t growth_interval = 256;
  OnOverflow on_overflow = OnOverflow::kSkip;
  int64_t max_skips_in_row = 0;
  bool rerun = false;  // the loop runs batches again: ScalePolicy::rerun

  HEADROOM_API operator ScalePolicy() const;  // NOLINT: meant to be implicit
};

/// No scaling: a constant 1, for BF16 and FP32. Overflow is found and skipped all the same.
struct NoScale {
  operator ScalePolicy() const { return StaticScale{1.0f}; }  // NOLINT: meant to be implicit
};

/// The settings of a system that people know, by name: "torch", "apex", "megatron", ... Throws
/// Error(kInvalidArgument), listing all names, for an unknown one.
HEADROOM_API ScalePolicy preset(const std::string& name);

struct PresetInfo {
  const char* name;
  const char* summary;
};

/// All presets, in the order of the documentation.
HEADROOM_API const std::vector<PresetInfo>& presets();

/// Throws Error(kInvalidArgument) with a sentence unless every setting is possible.
HEADROOM_API void validate(const ScalePolicy& policy);

/// Whether the policy's bounds allow this scale. With a grad_limit only powers of two.
HEADROOM_HOST_DEVICE inline bool allows(const ScalePolicy& policy, float scale) {
  const bool above = policy.stay_above_min ? scale > policy.min_scale : scale >= policy.min_scale;
  if (!above || !(scale <= policy.max_scale)) return false;
  uint32_t bits = 0;
  memcpy(&bits, &scale, sizeof bits);
  return !(policy.grad_limit > 0.0f) || (bits & 0x7fffffu) == 0;  // no scale is subnormal
}

inline constexpr int32_t kLevels = 32;  // of ScaleState::ages

/// Everything about the scale that changes while training, and all that a checkpoint needs.
struct ScaleState {
  float scale = 0.0f;          // multiplies the next loss
  float pending = 0.0f;        // the scale after that; differs from `scale` only for late policies
  int32_t growth_tracker = 0;  // clean steps in a row, from -extra; grows at growth_interval
  int32_t delay_left = 1;      // overflows until the scale shrinks
  int64_t since_rescale = 0;   // steps since the scale last moved
  int64_t overflows_since_rescale = 0;
  int64_t skips_in_row = 0;
  int64_t steps = 0;    // updates so far
  int64_t skipped = 0;  // of which overflows

  /// Of policies with a grad_limit; 0 in all others. Magnitudes are log2 in 1/65536.
  int32_t samples = 0;         // clean steps whose largest gradient was known
  int32_t peak = 0;            // largest unscaled gradient of this window of steps
  int32_t peak_before = 0;     // and of the window before
  int32_t window = 0;          // steps of this window so far
  int32_t scatter = 0;         // largest rise of late from window to window
  int32_t lowest = 0;          // the exponent of ages[0]
  int32_t ages[kLevels] = {};  // for scales 2^lowest, x2, ...: steps since it was too high
  int32_t back = 0;            // the exponent to which the scale returns at once after overflows
  int32_t gap = 0;             // how far below grad_limit backward was found to overflow
  int32_t retry_wait = 0;      // clean steps that a gap is kept which growth ran into
  int32_t retry_left = 0;      // clean steps until the gap is narrowed
  int32_t trial_left = 0;      // clean steps until the last growth counts as a success
  int32_t calm = 0;            // clean steps since the last overflow
  float failed_scale = 0.0f;   // the first that overflowed since the last clean step; 0: none
};

/// The state before the first step.
HEADROOM_HOST_DEVICE inline ScaleState initial_state(const ScalePolicy& policy) {
  ScaleState state;
  state.scale = policy.init_scale;
  state.pending = policy.init_scale;
  state.growth_tracker = -policy.first_growth_extra;
  state.delay_left = policy.hysteresis;
  return state;
}

enum class Alarm : uint8_t {
  kNone,
  kAtFloor,     // an overflow asked for a smaller scale, and there is none
  kSkipsInRow,  // max_skips_in_row reached
};

struct Transition {
  ScaleState state;
  Alarm alarm = Alarm::kNone;
};

/// What the steps between two updates found.
struct StepSeen {
  bool overflow = false;
  double amax = 0.0;  // largest finite magnitude of the gradients, still scaled; 0 if not known
};

namespace internal {

// The rule of policies with a grad_limit; defined in <headroom/headroom_rule.h>.
HEADROOM_HOST_DEVICE inline float headroom_rule(const ScalePolicy& policy, const StepSeen& seen,
                                                Transition* next);

// Products are formed in double and rounded once.
HEADROOM_HOST_DEVICE inline float grown(const ScalePolicy& policy, float scale) {
  const double product = static_cast<double>(scale) * policy.growth_factor;
  return product < policy.max_scale ? static_cast<float>(product) : policy.max_scale;
}

// The smaller scale, or `scale` itself if there is none.
HEADROOM_HOST_DEVICE inline float shrunk(const ScalePolicy& policy, float scale) {
  const auto product = static_cast<float>(static_cast<double>(scale) * policy.backoff_factor);
  if (product > policy.min_scale) return product;
  return policy.stay_above_min ? scale : (scale < policy.min_scale ? scale : policy.min_scale);
}

HEADROOM_HOST_DEVICE inline float after_overflow(const ScalePolicy& policy, float scale,
                                                 Transition* next) {
  ScaleState& state = next->state;
  ++state.overflows_since_rescale;
  ++state.skipped;
  ++state.skips_in_row;
  state.growth_tracker = -policy.first_growth_extra;
  const double share =
      static_cast<double>(state.overflows_since_rescale) / static_cast<double>(state.since_rescale);
  if (share < policy.tolerance) return scale;
  if (state.delay_left > 1) {
    --state.delay_left;
    return scale;
  }
  if (policy.refill_on_shrink) state.delay_left = policy.hysteresis;
  state.since_rescale = 0;
  state.overflows_since_rescale = 0;
  const float smaller = shrunk(policy, scale);
  if (smaller == scale) next->alarm = Alarm::kAtFloor;
  return smaller;
}

HEADROOM_HOST_DEVICE inline float after_clean_step(const ScalePolicy& policy, float scale,
                                                   Transition* next) {
  ScaleState& state = next->state;
  state.skips_in_row = 0;
  if (policy.refill_on_clean) state.delay_left = policy.hysteresis;
  if (++state.growth_tracker < policy.growth_interval) return scale;
  state.growth_tracker = -policy.next_growth_extra;
  if (policy.refill_on_growth) state.delay_left = policy.hysteresis;
  state.since_rescale = 0;  // overflows_since_rescale stays, as in fairseq
  return grown(policy, scale);
}

}  // namespace internal

/// How many skips in a row raise the alarm; 0: any number may be.
HEADROOM_HOST_DEVICE inline int64_t most_skips(const ScalePolicy& policy) {
  constexpr int64_t kFourBatches = 32;
  return policy.rerun && policy.max_skips_in_row == 0 ? kFourBatches : policy.max_skips_in_row;
}

/// The state after a step. This is the whole state machine.
HEADROOM_HOST_DEVICE inline Transition next_state(const ScalePolicy& policy,
                                                  const ScaleState& state, const StepSeen& seen) {
  const bool overflow = seen.overflow;
  Transition next{state, Alarm::kNone};
  ++next.state.steps;
  ++next.state.since_rescale;
  const float current = policy.late ? state.pending : state.scale;
  if (!policy.dynamic) {
    next.state.skipped += overflow;
    next.state.skips_in_row = overflow ? next.state.skips_in_row + 1 : 0;
  } else if (policy.grad_limit > 0.0) {
    next.state.pending = next.state.scale = internal::headroom_rule(policy, seen, &next);
  } else {
    next.state.pending = overflow ? internal::after_overflow(policy, current, &next)
                                  : internal::after_clean_step(policy, current, &next);
    next.state.scale = policy.late ? current : next.state.pending;
  }
  const int64_t most = most_skips(policy);
  const bool too_many = most > 0 && next.state.skips_in_row >= most;
  if (overflow && too_many && next.alarm == Alarm::kNone) next.alarm = Alarm::kSkipsInRow;
  return next;
}

/// The same where nothing is known but whether the step overflowed.
HEADROOM_HOST_DEVICE inline Transition next_state(const ScalePolicy& policy,
                                                  const ScaleState& state, bool overflow) {
  return next_state(policy, state, StepSeen{overflow, 0.0});
}

/// Whether the batch of the last step is to be run again: it was skipped, and the scale is lower
/// now for its sake. Policies without `rerun` never say so.
HEADROOM_HOST_DEVICE inline bool run_again(const ScalePolicy& policy, const ScaleState& state) {
  const bool lowered = state.skips_in_row > 0 && state.scale < state.failed_scale;
  return policy.rerun && policy.dynamic && lowered;
}

/// 1/scale, formed in double and rounded once.
HEADROOM_HOST_DEVICE inline float inverse(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

enum class Skip : uint8_t {
  kNo,               // the step is applied
  kNotFinite,        // inf or nan in the gradients
  kUnscaleOverflow,  // finite, but unscaled beyond FP32, or beyond kLargestGradient for the step
};

/// The largest gradient that a step is made with, unscaled and clipped: its square, and what
/// momentum adds up, fit into FP32. A larger one would turn Adam's moments into inf for good.
inline constexpr double kLargestGradient = 0x1p63;

/// What is to be done with the gradients of one optimizer.
struct Verdict {
  Skip skip = Skip::kNo;
  float multiplier = 0.0f;   // gradient in memory x multiplier = what the optimizer uses
  double grad_norm = 0.0;    // L2 norm of the unscaled gradients, before clipping
  double clip_factor = 1.0;  // <= 1; already part of the multiplier

  HEADROOM_HOST_DEVICE bool apply() const { return skip == Skip::kNo; }
};

/// Whether gradients can be divided by it: scale and reciprocal are normal floats.
HEADROOM_HOST_DEVICE inline bool usable(float scale) {
  return scale >= kSmallestScale && scale <= kLargestScale;
}

/// Decides on gradients that were scaled by `scale`: norm is GradStats::norm() and amax
/// GradStats::amax, both as in memory. `max_norm` <= 0 means no clipping.
HEADROOM_HOST_DEVICE inline Verdict decide(bool finite, double norm, double amax, float scale,
                                           double max_norm) {
  Verdict verdict;
  if (!usable(scale)) {
    verdict.skip = Skip::kUnscaleOverflow;
    verdict.grad_norm = norm;
    return verdict;
  }
  const double factor = static_cast<double>(inverse(scale));
  verdict.grad_norm = norm * factor;
  if (!finite) {
    verdict.skip = Skip::kNotFinite;
    return verdict;
  }
  if (max_norm > 0.0) {
    const double clip = max_norm / (verdict.grad_norm + 1e-6);
    if (clip < 1.0) verdict.clip_factor = clip;
  }
  constexpr double kFloatMax = 3.4028234663852886e38;
  const double largest = amax * factor;
  if (largest > kFloatMax || largest * verdict.clip_factor > kLargestGradient) {
    verdict.skip = Skip::kUnscaleOverflow;
    return verdict;
  }
  verdict.multiplier = static_cast<float>(factor * verdict.clip_factor);
  return verdict;
}

}  // namespace headroom

#include <headroom/headroom_rule.h>

#endif  // HEADROOM_POLICY_H_
