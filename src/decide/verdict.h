// The verdict on the gradients of one optimizer: apply or skip, and the multiplier. The same source
// runs on the host and in CUDA kernels.
#ifndef HEADROOM_SRC_DECIDE_VERDICT_H_
#define HEADROOM_SRC_DECIDE_VERDICT_H_

#include <headroom/policy.h>

namespace headroom::internal {

/// 1/scale, computed in double and rounded once.
HEADROOM_HOST_DEVICE inline float inverse(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

/// Whether gradients can be divided by this scale: it and its reciprocal are normal floats.
HEADROOM_HOST_DEVICE inline bool usable(float scale) {
  return scale >= kSmallestScale && scale <= kLargestScale;
}

/// The largest unscaled and clipped gradient that a step accepts. Its square, and the sums that
/// momentum makes of it, fit into FP32. A larger one would make Adam's moments inf permanently.
inline constexpr double kLargestGradient = 0x1p63;

/// What to do with the gradients of one optimizer.
struct Verdict {
  Skip skip = Skip::kNo;
  float multiplier = 0.0f;   // the optimizer uses gradient in memory x multiplier
  double grad_norm = 0.0;    // L2 norm of the unscaled gradients, before clipping
  double clip_factor = 1.0;  // <= 1; already part of the multiplier

  HEADROOM_HOST_DEVICE bool apply() const { return skip == Skip::kNo; }
};

/// Whether a skip is a reason to lower the scale.
HEADROOM_HOST_DEVICE inline bool overflowed(Skip skip) {
  return skip == Skip::kNotFinite || skip == Skip::kUnscaleOverflow;
}

/// The factor from one scale to another: a power of two if both are, clamped so that it is never 0
/// or inf.
HEADROOM_HOST_DEVICE inline float rescale_factor(float from, float to) {
  const double ratio = static_cast<double>(to) / static_cast<double>(from);
  return ratio < static_cast<double>(kSmallestScale)  ? kSmallestScale
         : ratio > static_cast<double>(kLargestScale) ? kLargestScale
                                                      : static_cast<float>(ratio);
}

/// Limits on the norm of the unscaled gradients; 0: none.
struct NormLimits {
  double clip = 0.0;        // multiply them so that their norm is at most this
  double skip_above = 0.0;  // skip the step if their norm is larger
};

/// Decides on gradients that were scaled by `scale`. `norm` and `amax` are those of the gradients
/// in memory, before unscaling.
HEADROOM_HOST_DEVICE inline Verdict decide(bool finite, double norm, double amax, float scale,
                                           const NormLimits& limits) {
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
  if (limits.clip > 0.0) {
    const double clip = limits.clip / (verdict.grad_norm + 1e-6);  // torch's formula
    if (clip < 1.0) verdict.clip_factor = clip;
  }
  // The unscaled gradient has to fit into FP32 even if clipping would make it smaller.
  constexpr double kFloatMax = 3.4028234663852886e38;
  const double largest = amax * factor;
  if (largest > kFloatMax || largest * verdict.clip_factor > kLargestGradient) {
    verdict.skip = Skip::kUnscaleOverflow;
    return verdict;
  }
  if (limits.skip_above > 0.0 && verdict.grad_norm > limits.skip_above) {
    verdict.skip = Skip::kNormTooLarge;
    return verdict;
  }
  verdict.multiplier = static_cast<float>(factor * verdict.clip_factor);
  return verdict;
}

/// What bindings of frameworks read of an optimizer's last unscale_ or step, as one float each: on
/// the device where the scaler is there, else on the host.
struct StepNumbers {
  float found_inf;  // 1 if unscale_ found inf or nan, or the step was skipped; else 0. A binding
                    // may set it between unscale_ and step to have the step skipped.
  float divisor;    // gradient / divisor = the unscaled, clipped gradient
  float grad_norm;  // L2 norm of the unscaled gradients before clipping
};

HEADROOM_HOST_DEVICE inline StepNumbers step_numbers(const Verdict& verdict, float scale) {
  return {verdict.apply() ? 0.0f : 1.0f,
          static_cast<float>(static_cast<double>(scale) / verdict.clip_factor),
          static_cast<float>(verdict.grad_norm)};
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DECIDE_VERDICT_H_
