// Headroom's rule: the scale follows the largest measured gradient; see docs/policies.md. It must
// not know about tensors, devices or other policies. Every operation is exact or correctly rounded,
// so that the host and CUDA devices compute the same bits. Scales are powers of two and handled by
// their exponents.
#ifndef HEADROOM_SRC_DECIDE_HEADROOM_RULE_H_
#define HEADROOM_SRC_DECIDE_HEADROOM_RULE_H_

#include <headroom/policy.h>
#include <math.h>  // NOLINT: ldexp and ilogb, also in device code

#include <cstdint>

namespace headroom::internal {

inline constexpr int32_t kUsualExponent = 16;  // 2^16, where most scalers start
inline constexpr int32_t kNoFailure = -1000;

/// The state of the rule.
struct HeadroomMemory {
  int32_t climb_to = kUsualExponent;  // below this, the scale doubles after every clean step
  int32_t failed = kNoFailure;        // exponent at which the current series of overflows began
  int32_t calm = 0;   // clean steps in a row with room to grow; negative: growth is paused
  int32_t age = 0;    // clean steps since the scale last grew beyond climb_to, up to an interval
  int32_t pause = 0;  // length of the last pause, in growth intervals
};

struct HeadroomResult {
  float scale = 0.0f;     // of the next step or of the retried batch
  bool at_floor = false;  // an overflow asked for a smaller scale and there is none
};

// Calm steps before the scale doubles. The higher the scale, the fewer gradients another doubling
// saves from underflow, so above 2^16 each doubling takes longer. With `retry` an overflow costs
// too little to be that cautious.
HEADROOM_HOST_DEVICE inline int32_t steps_to_grow(const HeadroomScale& settings, int32_t now) {
  const bool slow = !settings.retry && now > kUsualExponent;
  return settings.growth_interval * (slow ? 1 + now - kUsualExponent : 1);
}

// The exponent after an overflow. Repeated overflows back off ever faster from the first failure.
HEADROOM_HOST_DEVICE inline int32_t exponent_after_overflow(const HeadroomScale& settings,
                                                            int32_t now, HeadroomMemory* memory) {
  if (memory->failed < now) memory->failed = now;
  const int32_t failed = memory->failed, lowest = ilogb(settings.min_scale);
  if (now <= lowest && settings.retry) {  // no scale helps this batch: skip it, restore the scale
    memory->failed = kNoFailure;
    return failed;
  }
  // A retried batch: 1, 3, 7, 15 ... bits below the first failure, to stay as high as possible.
  // Otherwise 10, 30, 70 ..., because every further overflow would lose a batch.
  const int32_t next = now - (failed - now) - (settings.retry ? 1 : 10);
  return next < lowest ? lowest : next;
}

// The exponent after a clean step. `fits`: the largest exponent that the gradients of this step
// allow. A growth that led to an overflow pauses further growth, longer each time.
HEADROOM_HOST_DEVICE inline int32_t exponent_after_clean(const HeadroomScale& settings, int32_t now,
                                                         int32_t fits, HeadroomMemory* memory) {
  const bool recovering = memory->failed != kNoFailure;  // the first clean step after overflows
  if (memory->calm < steps_to_grow(settings, now)) ++memory->calm;
  if (memory->age < settings.growth_interval) ++memory->age;
  if (recovering) {
    if (memory->calm > 0) memory->calm = 0;
    if (memory->calm == 0 && memory->age < settings.growth_interval) {  // a recent growth failed
      const int32_t longer = memory->pause < 32 ? 2 * memory->pause : 32;
      memory->pause = settings.retry || memory->pause == 0 ? 4 : longer;
      memory->calm = -memory->pause * settings.growth_interval;
    }
    memory->climb_to = memory->failed - 1;
    memory->failed = kNoFailure;
  }
  if (recovering && settings.retry) return now;  // a retried batch is not typical of the next ones
  if (fits < memory->climb_to) memory->climb_to = fits;
  if (fits <= now) {  // no room to grow; if less than `now`, a similar gradient might overflow next
    if (memory->calm > 0) memory->calm = 0;
    return fits;
  }
  if (now < memory->climb_to) return now + 1;
  if (memory->calm < steps_to_grow(settings, now)) return now;
  memory->calm = memory->age = 0;
  return memory->climb_to = now + 1;
}

/// The scale after an update. `amax`: largest finite gradient, still scaled; 0 or NaN: unknown.
HEADROOM_HOST_DEVICE inline HeadroomResult headroom_rule(const HeadroomScale& settings, float scale,
                                                         bool overflow, double amax,
                                                         HeadroomMemory* memory) {
  const int32_t now = ilogb(scale), lowest = ilogb(settings.min_scale);
  int32_t fits = ilogb(settings.max_scale);  // the largest exponent that these gradients allow
  if (amax > 0.0 && amax <= settings.grad_limit) {     // larger: in FP32, where nothing overflows
    const double limit = settings.grad_limit * 0.875;  // safety margin of one eighth
    int32_t doublings = ilogb(limit) - ilogb(amax);    // how often amax can double below the limit
    if (ldexp(amax, doublings) > limit) --doublings;
    if (now + doublings < fits) fits = now + doublings < lowest ? lowest : now + doublings;
  }
  const int32_t next = overflow ? exponent_after_overflow(settings, now, memory)
                                : exponent_after_clean(settings, now, fits, memory);
  return {static_cast<float>(ldexp(1.0, next)), overflow && now <= lowest && !settings.retry};
}

/// Whether the batch of the last step was skipped and has to be retried at the current scale.
HEADROOM_HOST_DEVICE inline bool headroom_retry(const HeadroomScale& s, const HeadroomMemory& m) {
  return s.retry && m.failed != kNoFailure;
}

/// Whether the rule can reach this memory; load() refuses any other.
inline bool valid(const HeadroomScale& s, const HeadroomMemory& m) {
  return m.climb_to >= -127 && m.climb_to <= 126 && m.failed <= 126 && m.pause >= 0 &&
         m.pause <= 32 && (m.failed >= -126 || m.failed == kNoFailure) && m.age >= 0 &&
         m.age <= s.growth_interval && m.calm >= -m.pause * s.growth_interval &&
         m.calm <= steps_to_grow(s, ilogb(s.max_scale));
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DECIDE_HEADROOM_RULE_H_
