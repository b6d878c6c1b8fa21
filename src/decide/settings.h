// The one list of policy settings: names, bounds, meaning. JSON, the C and Python APIs, the command
// line, validate() and the table in docs/policies.md are generated from it.
#ifndef HEADROOM_SRC_DECIDE_SETTINGS_H_
#define HEADROOM_SRC_DECIDE_SETTINGS_H_

#include <headroom/policy.h>

#include <limits>

namespace headroom {

/// One setting and its allowed values.
struct Setting {
  const char* name;
  const char* summary;
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  const char* allowed = "";  // the bounds in words, as the end of "it has to be ..."
};

inline const char* word_of(OnOverflow value) {
  return value == OnOverflow::kThrow ? "throw" : "skip";
}

/// Calls visit(Setting, member) for every setting of the policy's rule.
struct PolicySettings {
  template <typename Policy, typename Visit>
  static void visit(Policy& policy, const Visit& visit) {
    switch (policy.rule_) {
      case ScalePolicy::Rule::kStatic:
        return of_static(policy.static_, visit);
      case ScalePolicy::Rule::kDynamic:
        return of_dynamic(policy.dynamic_, visit);
      case ScalePolicy::Rule::kHeadroom:
        return of_headroom(policy.headroom_, visit);
    }
  }

 private:
  static constexpr double kMaxInt = std::numeric_limits<int32_t>::max();
  static constexpr double kMaxSkips = 1e15;  // exact as a double
  // A smaller change of the scale would be rounded away in FP32.
  static constexpr double kLeastChange = 1e-6;

  // Kinds of settings that several rules have.
  static constexpr Setting scale(const char* name, const char* summary) {
    return {name, summary, kSmallestScale, kLargestScale,
            "a number from 2^-126 to 2^126, so that 1/scale is safe too"};
  }
  static constexpr Setting count(const char* name, const char* summary, double least,
                                 const char* allowed) {
    return {name, summary, least, kMaxInt, allowed};
  }
  static constexpr Setting flag(const char* name, const char* summary) {
    return {name, summary, 0.0, 1.0, "true or false"};
  }
  static constexpr Setting on_overflow() {
    return {"on_overflow", "what step() does on overflow besides skipping: nothing, or throw", 0.0,
            1.0, "skip or throw"};
  }
  static constexpr Setting max_skips(
      const char* summary = "alarm when so many steps in a row were skipped; 0: never") {
    return {"max_skips_in_row", summary, 0.0, kMaxSkips, "0 or more"};
  }

  // One function per rule. `Rule` may be const: reading and changing use the same list.
  template <typename Rule, typename Visit>
  static void of_static(Rule& rule, const Visit& visit) {
    visit(scale("scale", "the constant scale"), rule.scale);
    visit(on_overflow(), rule.on_overflow);
    visit(max_skips(), rule.max_skips_in_row);
  }

  template <typename Rule, typename Visit>
  static void of_dynamic(Rule& rule, const Visit& visit) {
    visit(scale("init_scale", "scale of the first step"), rule.init_scale);
    visit(Setting{"growth_factor", "growth multiplies the scale by this", 1.0 + kLeastChange,
                  kLargestScale, "a finite number above 1, by 1e-6 at least"},
          rule.growth_factor);
    visit(Setting{"backoff_factor", "an overflow multiplies the scale by this", kSmallestScale,
                  1.0 - kLeastChange, "above 0 and below 1, by 1e-6 at least"},
          rule.backoff_factor);
    visit(count("growth_interval", "clean steps in a row before the scale grows", 1.0, "1 or more"),
          rule.growth_interval);
    visit(scale("min_scale", "smallest scale"), rule.min_scale);
    visit(scale("max_scale", "largest scale"), rule.max_scale);
    visit(on_overflow(), rule.on_overflow);
    visit(max_skips(), rule.max_skips_in_row);
    visit(
        count("hysteresis", "overflows until the scale shrinks", 1.0, "1 (shrink at once) or more"),
        rule.hysteresis);
    visit(flag("refill_on_growth", "growth restarts the count of overflows"),
          rule.refill_on_growth);
    visit(flag("refill_on_clean", "any clean step restarts the count of overflows"),
          rule.refill_on_clean);
    visit(flag("refill_on_shrink", "a smaller scale restarts the count of overflows"),
          rule.refill_on_shrink);
    visit(count("first_growth_extra", "more clean steps before the first growth after an overflow",
                0.0, "0 or more"),
          rule.first_growth_extra);
    visit(count("next_growth_extra", "more clean steps before a growth after another growth", 0.0,
                "0 or more"),
          rule.next_growth_extra);
    visit(Setting{"tolerance", "share of overflowing steps that does not shrink the scale", 0.0,
                  1.0, "a share of steps, from 0 to 1"},
          rule.tolerance);
    visit(flag("late", "a new scale is used one step late"), rule.late);
    visit(flag("stay_above_min", "the scale never reaches min_scale"), rule.stay_above_min);
    visit(flag("double_when_small",
               "doubles a scale below 2 in every 25th step, below 8 in every 100th, below 32 in "
               "every 400th"),
          rule.double_when_small);
  }

  template <typename Rule, typename Visit>
  static void of_headroom(Rule& rule, const Visit& visit) {
    visit(Setting{"grad_limit", "largest number of the gradients' format", kSmallestScale,
                  std::numeric_limits<double>::max(),
                  "the largest number of the gradients' format, 65504 in FP16"},
          rule.grad_limit);
    visit(scale("init_scale", "scale of the first step; a power of two"), rule.init_scale);
    visit(scale("min_scale", "smallest scale; a power of two"), rule.min_scale);
    visit(scale("max_scale", "largest scale; a power of two"), rule.max_scale);
    visit(Setting{"growth_interval",
                  "clean steps before each doubling above climb_limit (2^16 at first); from 2^17 "
                  "on 2, 3, 4 ... times as many",
                  1.0, 1 << 20, "from 1 to 1048576"},
          rule.growth_interval);
    visit(on_overflow(), rule.on_overflow);
    visit(
        max_skips("alarm when so many steps in a row were skipped; 0: never, with retry after 32"),
        rule.max_skips_in_row);
    visit(flag("retry", "skipped batches are retried at a lower scale"), rule.retry);
  }
};

}  // namespace headroom

#endif  // HEADROOM_SRC_DECIDE_SETTINGS_H_
