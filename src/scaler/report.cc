// The texts of reports.
#include <limits>

#include "core/check.h"
#include "scaler/scaler.h"

namespace headroom {

std::string internal::describe_unscaling(double amax, float scale) {
  if (!usable(scale)) return "a scale of " + short_number(scale) + " cannot be divided by";
  const std::string quotient = short_number(amax) + " / " + short_number(scale) + " is beyond ";
  const bool fits = amax / static_cast<double>(scale) <= std::numeric_limits<float>::max();
  return quotient + (fits ? "2^63, the largest gradient that a step accepts" : "FP32");
}

std::string internal::describe_unscaling_in_place(double amax, float scale) {
  return short_number(amax) + " / " + short_number(scale) +
         " is beyond FP16, in which this optimizer unscales";
}

// A skip for the norm has no culprit: no single tensor is responsible.
std::string StepReport::to_string() const {
  using internal::short_number;
  if (pending) return "pending: not known yet; call report() or try_report()";
  const std::string at_scale = " at scale " + short_number(scale) + ": ";
  if (applied) {
    std::string text = "applied" + at_scale + "norm " + short_number(grad_norm);
    if (clip_factor < 1.0) text += ", clipped by " + short_number(clip_factor);
    return text;
  }
  const bool large = skip == Skip::kNormTooLarge;
  return "skipped" + at_scale +
         (large ? "norm " + short_number(grad_norm) + " is above skip_above_norm" : culprit);
}

}  // namespace headroom
