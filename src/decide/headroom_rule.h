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
  int32_t climb_limit = kUsualExponent;  // below this, the scale doubles after every clean step
  int32_t backoff_from = kNoFailure;     // exponent at which the current overflows began
  int32_t clean_steps = 0;               // in a row with room to grow; negative: growth is paused
  int32_t steps_since_growth = 0;  // clean steps since growth beyond climb_limit, up to an interval
  int32_t pause = 0;               // length of the last pause, in growth intervals
};

struct HeadroomResult {
  float scale = 0.0f;     // of the next step or of the retried batch
  bool at_floor = false;  // an overflow asked for a smaller scale and there is none
};

// Clean steps before the scale doubles. The higher the scale, the fewer gradients another doubling
// saves from underflow, so above 2^16 each doubling takes longer. With `retry` an overflow costs
// too little to be that cautious.
HEADROOM_HOST_DEVICE inline int32_t steps_to_grow(const HeadroomScale& settings, int32_t now) {
  const bool slow = !settings.retry && now > kUsualExponent;
  return settings.growth_interval * (slow ? 1 + now - kUsualExponent : 1);
}

// The exponent after an overflow. Repeated overflows back off ever faster from the first failure.
HEADROOM_HOST_DEVICE inline int32_t exponent_after_overflow(const HeadroomScale& settings,
                                                            int32_t now, HeadroomMemory* memory) {
  if (memory->backoff_from < now) memory->backoff_from = now;
  const int32_t first = memory->backoff_from, lowest = ilogb(settings.min_scale);
  if (now <= lowest && settings.retry) {  // no scale helps this batch: skip it, restore the scale
    memory->backoff_from = kNoFailure;
    return first;
  }
  // A retried batch: 1, 3, 7, 15 ... bits below the first failure, to stay as high as possible.
  // Otherwise 10, 30, 70 ..., because every further overflow would lose a batch.
  const int32_t next = now - (first - now) - (settings.retry ? 1 : 10);
  return next < lowest ? lowest : next;
}

// The exponent after a clean step. `fits`: the largest exponent that the gradients of this step
// allow. A growth that led to an overflow pauses further growth, longer each time.
HEADROOM_HOST_DEVICE inline int32_t exponent_after_clean(const HeadroomScale& settings, int32_t now,
                                                         int32_t fits, HeadroomMemory* memory) {
  const bool recovering = memory->backoff_from != kNoFailure;  // first clean step after overflows
  if (memory->clean_steps < steps_to_grow(settings, now)) ++memory->clean_steps;
  if (memory->steps_since_growth < settings.growth_interval) ++memory->steps_since_growth;
  if (recovering) {
    if (memory->clean_steps > 0) memory->clean_steps = 0;
    const bool growth_failed = memory->steps_since_growth < settings.growth_interval;
    if (memory->clean_steps == 0 && growth_failed) {
      const int32_t longer = memory->pause < 32 ? 2 * memory->pause : 32;
      memory->pause = settings.retry || memory->pause == 0 ? 4 : longer;
      memory->clean_steps = -memory->pause * settings.growth_interval;
    }
    memory->climb_limit = memory->backoff_from - 1;
    memory->backoff_from = kNoFailure;
  }
  if (recovering && settings.retry) return now;  // a retried batch is not typical of the next ones
  if (fits < memory->climb_limit) memory->climb_limit = fits;
  if (fits <= now) {  // no room to grow; if less than `now`, a similar gradient might overflow next
    if (memory->clean_steps > 0) memory->clean_steps = 0;
    return fits;
  }
  if (now < memory->climb_limit) return now + 1;
  if (memory->clean_steps < steps_to_grow(settings, now)) return now;
  memory->clean_steps = memory->steps_since_growth = 0;
  return memory->climb_limit = now + 1;
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
  return s.retry && m.backoff_from != kNoFailure;
}

/// Whether the rule can reach this memory; load() refuses any other.
inline bool valid(const HeadroomScale& s, const HeadroomMemory& m) {
  const bool pause = m.pause == 0 || m.pause == 4 || m.pause == 8 || m.pause == 16 || m.pause == 32;
  return pause && m.climb_limit >= -127 && m.climb_limit <= 126 && m.backoff_from <= 126 &&
         (m.backoff_from >= -126 || m.backoff_from == kNoFailure) && m.steps_since_growth >= 0 &&
         m.steps_since_growth <= s.growth_interval &&
         m.clean_steps >= -m.pause * s.growth_interval &&
         m.clean_steps <= steps_to_grow(s, ilogb(s.max_scale));
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DECIDE_HEADROOM_RULE_H_
