#include <headroom/inspect.h>

#include <cmath>
#include <string>

#include "core/check.h"
#include "inspect/numbers.h"

namespace headroom {
namespace {

constexpr int kLowestPower = -126;
constexpr int kHighestPower = 126;

using internal::three_digits;

std::string power_text(int power) { return "2^" + std::to_string(power); }

// A share with three digits: "0 %", "0.012 %", "3.4 %". "100 %" only if `part` equals `whole`.
std::string percent(int64_t part, int64_t whole) {
  const double value = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  return part < whole && value >= 99.95 ? ">99.9 %" : three_digits(value) + " %";
}

// The outcomes of the gradients at scales of 2^power. With growing power, scales become less safe
// and fewer gradients are lost.
class Scales {
 public:
  Scales(const Magnitudes& gradients, const AdviceOptions& options)
      : gradients_(gradients), options_(options) {}

  Outcome at(int power) const { return gradients_.at(options_.format, power); }
  // Whether the largest gradient stays 2^margin below overflow.
  bool safe(int power) const {
    const FormatLimits& limit = limits(options_.format);
    const double raised = std::ldexp(gradients_.largest(), power + options_.margin);
    return limit.tie_overflows ? raised < limit.overflow : raised <= limit.overflow;
  }
  bool loses_little(int64_t lost) const {
    return static_cast<double>(lost) / static_cast<double>(gradients_.nonzero()) <= options_.lose;
  }
  int64_t not_normal(int power) const { return at(power).flushed + at(power).subnormal; }

 private:
  const Magnitudes& gradients_;
  const AdviceOptions& options_;
};

// Finds the powers of two at which nothing overflows and few gradients are lost.
void find_range(const Scales& scales, ScaleAdvice* advice) {
  for (int power = kLowestPower; power <= kHighestPower; ++power) {
    const Outcome outcome = scales.at(power);
    if (outcome.overflow > 0 || !scales.loses_little(outcome.flushed)) continue;
    const float scale = std::ldexp(1.0f, power);
    if (advice->lowest == 0.0f) advice->lowest = scale;
    advice->highest = scale;
  }
}

// "0.012 % become zero and none subnormal".
std::string losses(const Outcome& outcome, int64_t nonzero) {
  const std::string flushed = outcome.flushed == 0
                                  ? "none becomes zero"
                                  : percent(outcome.flushed, nonzero) + " become zero";
  const std::string subnormal = outcome.subnormal == 0
                                    ? "none subnormal"
                                    : percent(outcome.subnormal, nonzero) + " subnormal";
  const std::string overflow =
      outcome.overflow == 0 ? "" : percent(outcome.overflow, nonzero) + " overflow, ";
  return overflow + flushed + " and " + subnormal;
}

// Explains why even 2^top, the largest safe scale, does not fit.
std::string none_fits(const Magnitudes& gradients, const AdviceOptions& options, int top,
                      const ScaleAdvice& advice) {
  const std::string format = limits(options.format).name;
  const std::string margin = three_digits(std::ldexp(1.0, options.margin));
  const std::string there = "; at that scale " + losses(advice.outcome, gradients.nonzero()) + ".";
  if (!Scales(gradients, options).safe(top)) {
    return "No scale fits: the largest gradient, " + three_digits(gradients.largest()) +
           ", is not " + margin + " times below overflow in " + format + " even at " +
           power_text(top) + ", the smallest possible scale" + there;
  }
  if (top == kHighestPower) {
    return "No scale fits: gradients reach down to " + three_digits(gradients.smallest()) +
           ", too small for " + format + " even at " + power_text(top) +
           ", the largest possible scale" + there;
  }
  return "No scale fits: gradients reach from " + three_digits(gradients.smallest()) + " to " +
         three_digits(gradients.largest()) + ", more than " + format + " can hold " + margin +
         " times below overflow; " + power_text(top) +
         " is the largest power of two with that distance" + there;
}

ScaleAdvice choose(const Magnitudes& gradients, const AdviceOptions& options) {
  internal::require(options.lose >= 0.0 && options.lose <= 1.0, ErrorCode::kInvalidArgument, [&] {
    return "The share that may be lost is " + internal::number(options.lose) +
           "; pass one from 0 to 1.";
  });
  internal::require(options.margin >= 0 && options.margin <= 64, ErrorCode::kInvalidArgument, [&] {
    return "The margin is " + std::to_string(options.margin) + "; pass 0 to 64 powers of two.";
  });
  const std::string format = limits(options.format).name;
  const int64_t nonzero = gradients.nonzero();
  ScaleAdvice advice;
  if (nonzero == 0) {
    advice.reason = "There is no finite nonzero gradient to choose a scale by.";
    return advice;
  }
  const Scales scales(gradients, options);
  find_range(scales, &advice);
  const std::string margin = three_digits(std::ldexp(1.0, options.margin));
  const std::string largest = "the largest gradient, " + three_digits(gradients.largest()) + ",";

  if (scales.safe(0) && scales.loses_little(scales.not_normal(0))) {
    advice.verdict = ScaleAdvice::Verdict::kUnneeded;
    advice.outcome = scales.at(0);
    advice.reason = "No scaling is needed: at scale 1 " + losses(advice.outcome, nonzero) + " in " +
                    format + ", and " + largest + " is at least " + margin +
                    " times below overflow.";
    return advice;
  }

  int top = kHighestPower;
  while (top > kLowestPower && !scales.safe(top)) --top;
  // With subnormal numbers, the larger scale is better: it keeps more of their bits.
  const auto equally_good = [&](int power) {
    const Outcome outcome = scales.at(power);
    return outcome.subnormal == 0 && outcome.flushed == scales.at(top).flushed;
  };
  if (!scales.safe(top) || !scales.loses_little(scales.at(top).flushed)) {
    advice.verdict = ScaleAdvice::Verdict::kNoneFits;
    advice.scale = std::ldexp(1.0f, top);
    advice.outcome = scales.at(top);
    advice.reason = none_fits(gradients, options, top, advice);
    return advice;
  }
  int bottom = top;
  while (bottom > kLowestPower && equally_good(bottom - 1)) --bottom;
  const int power = bottom + (top - bottom + 1) / 2;
  advice.verdict = ScaleAdvice::Verdict::kScale;
  advice.scale = std::ldexp(1.0f, power);
  advice.outcome = scales.at(power);
  const std::string place = bottom < top ? " is in the middle of " + power_text(bottom) + " to " +
                                               power_text(top) + ", which all keep "
                            : top == kHighestPower ? " is the largest possible scale, and keeps "
                                                   : " is the largest power of two that keeps ";
  advice.reason = power_text(power) + place + largest + " " + margin + " times below overflow in " +
                  format + "; at that scale " + losses(advice.outcome, nonzero) + ".";
  return advice;
}

}  // namespace

ScaleAdvice advise(const Magnitudes& gradients, const AdviceOptions& options) {
  ScaleAdvice advice = choose(gradients, options);
  const int64_t bad = gradients.infs() + gradients.nans();
  if (bad > 0) {
    advice.reason += " " + std::to_string(bad) + (bad == 1 ? " gradient is" : " gradients are") +
                     " inf or NaN, and not counted.";
  }
  return advice;
}

}  // namespace headroom
