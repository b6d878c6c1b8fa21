// decide: how the scale changes. A policy is one of three rules with its settings; presets
// reproduce the scalers of other frameworks. docs/policies.md describes every rule in full.
#ifndef HEADROOM_POLICY_H_
#define HEADROOM_POLICY_H_

#include <headroom/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// The widest possible range of a scale. Within it, the scale and its reciprocal are normal floats,
/// so that neither of them is ever 0 or inf.
inline constexpr float kSmallestScale = 0x1p-126f;
inline constexpr float kLargestScale = 0x1p126f;

/// What step() does on overflow, besides skipping.
enum class OnOverflow : uint8_t {
  kSkip,   // skip the step and continue
  kThrow,  // skip the step, then throw Error(kOverflow) from step()
};

/// A constant scale. An overflow still skips the step (or throws, see on_overflow).
struct StaticScale {
  float scale = 1024.0f;
  OnOverflow on_overflow = OnOverflow::kSkip;
  int64_t max_skips_in_row = 100;  // alarm after this many skipped steps in a row; 0: never
};

/// No scaling: a constant 1, for BF16 and FP32. Overflows are still detected and skipped.
struct NoScale {};

/// The rule of torch.amp.GradScaler and similar scalers: multiply by growth_factor after
/// growth_interval clean steps in a row, and by backoff_factor after an overflow.
struct DynamicScale {
  float init_scale = 65536.0f;
  double growth_factor = 2.0;      // > 1
  double backoff_factor = 0.5;     // between 0 and 1
  int32_t growth_interval = 2000;  // clean steps in a row before the scale grows
  float min_scale = 1.0f;
  float max_scale = 16777216.0f;  // 2^24
  OnOverflow on_overflow = OnOverflow::kSkip;
  int64_t max_skips_in_row = 0;  // as in StaticScale; an overflow at min_scale always alarms

  /// The scale shrinks at the `hysteresis`-th overflow; those before it only skip. The count
  /// restarts when the scale grows (refill_on_growth), after any clean step (refill_on_clean), or
  /// when the scale shrinks (refill_on_shrink).
  int32_t hysteresis = 1;
  bool refill_on_growth = true;
  bool refill_on_clean = false;
  bool refill_on_shrink = false;

  /// Quirks of other systems, set by their presets. Clean steps needed on top of growth_interval:
  /// before the first growth after the start or an overflow, and before a growth that follows
  /// another growth.
  int32_t first_growth_extra = 0;
  int32_t next_growth_extra = 0;
  /// An overflow shrinks the scale only if at least this share of the steps since its last change
  /// has overflowed. 0: every overflow does.
  double tolerance = 0.0;
  /// A new scale takes effect one step late, as in MXNet.
  bool late = false;
  /// A shrink that would reach min_scale leaves the scale unchanged, as in fairseq.
  bool stay_above_min = false;
  /// In addition, a small scale doubles on a schedule, as in icefall: below 2 in every 25th step,
  /// below 8 in every 100th, below 32 in every 400th, counted from the first step.
  bool double_when_small = false;
};

/// Headroom's own rule: the scale follows the largest gradient and is as high as is safe. Its
/// bounds and init_scale have to be powers of two.
struct HeadroomScale {
  double grad_limit = 65504.0;  // largest number of the gradients' format: FP16's
  float init_scale = 65536.0f;
  float min_scale = 0x1p-24f;
  float max_scale = 0x1p32f;
  /// Clean steps before each doubling above climb_limit, which is 2^16 at first and later at most
  /// half the last scale that overflowed (docs/policies.md). From 2^17 on 2, 3, 4 ... times as
  /// many.
  int32_t growth_interval = 256;
  OnOverflow on_overflow = OnOverflow::kSkip;
  /// As in DynamicScale. With `retry` it counts passes, and 0 means 32.
  int64_t max_skips_in_row = 0;

  /// The batch of a skipped step is retried at the scale that update() has set for it, see
  /// GradScaler::retry(). An overflow then costs a few passes but no batch, so the rule takes more
  /// risk. Only for one optimizer per round, and not with GradAccumulator.
  bool retry = false;
};

/// One of the rules, with its settings. Trivially copyable, so that it can be used on CUDA devices.
class ScalePolicy {
 public:
  /// Which of the three rules it is.
  enum class Rule : uint8_t { kStatic, kDynamic, kHeadroom };

  // NOLINTBEGIN(*-explicit-*): the settings of a rule are a policy.
  /// From the settings of any rule.
  constexpr ScalePolicy() : ScalePolicy(DynamicScale{}) {}
  constexpr ScalePolicy(const StaticScale& scale) : rule_(Rule::kStatic), static_(scale) {}
  constexpr ScalePolicy(const NoScale&) : ScalePolicy(StaticScale{1.0f}) {}
  constexpr ScalePolicy(const DynamicScale& scale) : rule_(Rule::kDynamic), dynamic_(scale) {}
  constexpr ScalePolicy(const HeadroomScale& scale) : rule_(Rule::kHeadroom), headroom_(scale) {}
  // NOLINTEND(*-explicit-*)

  /// Which rule it is.
  HEADROOM_HOST_DEVICE Rule rule() const { return rule_; }

  /// The settings of the rule; null if the policy has another rule.
  HEADROOM_HOST_DEVICE const StaticScale* if_static() const {
    return rule_ == Rule::kStatic ? &static_ : nullptr;
  }
  HEADROOM_HOST_DEVICE const DynamicScale* if_dynamic() const {
    return rule_ == Rule::kDynamic ? &dynamic_ : nullptr;
  }
  HEADROOM_HOST_DEVICE const HeadroomScale* if_headroom() const {
    return rule_ == Rule::kHeadroom ? &headroom_ : nullptr;
  }

  /// A copy of the settings, to change them. Throws Error(kInvalidArgument) if the policy has
  /// another rule.
  HEADROOM_API DynamicScale dynamic() const;

  /// Reads or changes a setting by its name, such as "growth_interval"; flags are 0 or 1. Throws
  /// Error(kInvalidArgument), listing the settings of this policy, for an unknown name, and if the
  /// type of the setting cannot hold the value. Bounds are checked by validate().
  HEADROOM_API double get(const std::string& setting) const;
  HEADROOM_API void set(const std::string& setting, double value);

  /// The first scale, the bounds, and whether a scale is allowed.
  HEADROOM_API float init_scale() const;
  HEADROOM_API float min_scale() const;
  HEADROOM_API float max_scale() const;
  HEADROOM_API bool allows(float scale) const;

  /// What step() does on overflow.
  HEADROOM_API OnOverflow on_overflow() const;

  /// Whether skipped batches have to be retried.
  HEADROOM_HOST_DEVICE bool retries() const { return rule_ == Rule::kHeadroom && headroom_.retry; }

 private:
  friend struct PolicySettings;

  Rule rule_;
  StaticScale static_;
  DynamicScale dynamic_;
  HeadroomScale headroom_;
};

/// One setting of a rule, for documentation and command lines.
struct SettingInfo {
  ScalePolicy::Rule rule;
  const char* name;
  std::string default_value;
  const char* allowed;  // "a number from 2^-126 to 2^126"
  const char* summary;
};

/// All settings of all rules.
HEADROOM_API std::vector<SettingInfo> policy_settings();

/// "static", "dynamic" or "headroom".
HEADROOM_API const char* to_string(ScalePolicy::Rule rule);

/// A policy that reproduces another framework's scaler, by name: "torch", "apex", "megatron", ...
/// Throws Error(kInvalidArgument), listing all names, for an unknown one.
HEADROOM_API ScalePolicy preset(const std::string& name);

/// Parses a policy from one line of text: a preset, and settings that differ from it: "megatron",
/// "static:512", "torch:growth_interval=500,max_skips_in_row=20". Throws Error(kInvalidArgument) if
/// the text is malformed or the policy is invalid.
HEADROOM_API ScalePolicy parse_policy(const std::string& text);

/// The rule and all settings in that form; numbers are exact.
HEADROOM_API std::string to_string(const ScalePolicy& policy);

/// A preset and what it is.
struct PresetInfo {
  const char* name;
  const char* summary;
};

/// All presets, in the order of the documentation.
HEADROOM_API const std::vector<PresetInfo>& presets();

/// Throws Error(kInvalidArgument) if a setting is out of its bounds.
HEADROOM_API void validate(const ScalePolicy& policy);

/// Why update() raises an alarm.
enum class Alarm : uint8_t {
  kNone,
  kAtFloor,     // an overflow requires a smaller scale than the policy allows
  kSkipsInRow,  // max_skips_in_row reached
};

/// The input of one update: the results of the steps since the last one.
struct StepSeen {
  bool overflow = false;
  double amax = 0.0;  // largest finite magnitude of the gradients, still scaled; 0 if not known
};

namespace internal {
struct ScaleRecord;
struct ScaleStateAccess;
}  // namespace internal

/// A policy, its scale and everything else that changes during training. Checkpoints contain it; on
/// its own it simulates a policy.
class HEADROOM_API ScaleState {
 public:
  /// The state before the first step. Throws Error(kInvalidArgument) if the policy is invalid.
  explicit ScaleState(const ScalePolicy& policy);

  float scale() const;      // multiplies the next loss
  int64_t steps() const;    // updates so far,
  int64_t skipped() const;  // of which overflows
  int64_t skips_in_row() const;
  const ScalePolicy& policy() const;

  /// Performs one update.
  Alarm advance(const StepSeen& seen);

  /// Whether the batch of the last step has to be retried: it was skipped, and the scale is lower
  /// now. Always false for policies without `retry`.
  bool retry() const;

  /// Converts policy and state to JSON text with exact numbers, and back. load() throws
  /// Error(kBadState) for missing, unknown or impossible values.
  std::string save() const;
  static ScaleState load(std::string_view json);

  friend HEADROOM_API bool operator==(const ScaleState& a, const ScaleState& b);
  friend bool operator!=(const ScaleState& a, const ScaleState& b) { return !(a == b); }

 private:
  friend struct internal::ScaleStateAccess;
  explicit ScaleState(const internal::ScaleRecord& record);

  std::shared_ptr<const internal::ScaleRecord> record_;
};

/// Why a step was skipped.
enum class Skip : uint8_t {
  kNo,               // the step is applied
  kNotFinite,        // inf or nan in the gradients
  kUnscaleOverflow,  // finite, but too large for FP32 or for the optimizer when unscaled
  kNormTooLarge,     // above StepOptions::skip_above_norm
};

}  // namespace headroom

#endif  // HEADROOM_POLICY_H_
