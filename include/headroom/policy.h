// decide: how the scale moves. A policy is one of three rules with its settings; presets reproduce
// the scalers that people know. Nothing here knows tensors or devices. docs/policies.md states
// every rule in full.
#ifndef HEADROOM_POLICY_H_
#define HEADROOM_POLICY_H_

#include <headroom/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// The widest range a scale may ever have: there both the scale and its reciprocal are normal
/// floats, so that multiplying and dividing by a power of two is exact and never gives 0 or inf.
inline constexpr float kSmallestScale = 0x1p-126f;
inline constexpr float kLargestScale = 0x1p126f;

enum class OnOverflow : uint8_t {
  kSkip,   // skip the step and continue
  kThrow,  // skip the step, then throw Error(kOverflow) from step()
};

/// A constant scale. An overflow still skips the step (or throws, by choice).
struct StaticScale {
  float scale = 1024.0f;
  OnOverflow on_overflow = OnOverflow::kSkip;
  int64_t max_skips_in_row = 100;  // alarm when so many steps in a row were skipped; 0: never
};

/// No scaling: a constant 1, for BF16 and FP32. Overflows are found and skipped all the same.
struct NoScale {};

/// The rule of torch.amp.GradScaler and its relatives: multiply by growth_factor after
/// growth_interval clean steps in a row, by backoff_factor after an overflow.
struct DynamicScale {
  float init_scale = 65536.0f;
  double growth_factor = 2.0;      // > 1
  double backoff_factor = 0.5;     // between 0 and 1
  int32_t growth_interval = 2000;  // clean steps in a row before the scale grows
  float min_scale = 1.0f;
  float max_scale = 16777216.0f;  // 2^24
  OnOverflow on_overflow = OnOverflow::kSkip;
  int64_t max_skips_in_row = 0;  // as in StaticScale; an overflow at min_scale always raises one

  /// The scale shrinks on the `hysteresis`-th overflow; those before it only skip. 1: at once. The
  /// count starts again when the scale grows (refill_on_growth), after any clean step
  /// (refill_on_clean), or when the scale shrinks (refill_on_shrink).
  int32_t hysteresis = 1;
  bool refill_on_growth = true;
  bool refill_on_clean = false;
  bool refill_on_shrink = false;

  /// Quirks of other systems, set by their presets. Clean steps needed on top of growth_interval:
  /// before the first growth after the start or an overflow, and before a growth that follows
  /// another growth.
  int32_t first_growth_extra = 0;
  int32_t next_growth_extra = 0;
  /// An overflow shrinks the scale only if at least this share of the steps since the scale last
  /// moved have overflowed. 0: every overflow does.
  double tolerance = 0.0;
  /// A new scale is used one step late, as in MXNet.
  bool late = false;
  /// A shrink that would reach min_scale leaves the scale where it is, as in fairseq.
  bool stay_above_min = false;
};

/// Headroom's own rule: the scale follows the largest gradient, as high as it is safe. Its bounds
/// and init_scale are powers of two.
struct HeadroomScale {
  double grad_limit = 65504.0;  // largest number of the gradients' format: FP16's
  float init_scale = 65536.0f;
  float min_scale = 0x1p-24f;
  float max_scale = 0x1p32f;
  int32_t growth_interval = 256;  // clean steps before each doubling above 2^16
  OnOverflow on_overflow = OnOverflow::kSkip;
  int64_t max_skips_in_row = 0;  // as in DynamicScale; with `retry` passes are counted, 0 means 32

  /// The batch of a skipped step is retried at the scale that update() has set for it
  /// (GradScaler::retry). An overflow then costs a few passes and no batch, and the rule takes more
  /// risks. For one optimizer in each round, and not for GradAccumulator.
  bool retry = false;
};

/// One of the rules, with its settings. Trivially copyable: the same bytes live on CUDA devices.
class ScalePolicy {
 public:
  enum class Rule : uint8_t { kStatic, kDynamic, kHeadroom };

  ScalePolicy() : ScalePolicy(DynamicScale{}) {}
  ScalePolicy(const StaticScale& scale) : rule_(Rule::kStatic), static_(scale) {}        // NOLINT
  ScalePolicy(const NoScale&) : ScalePolicy(StaticScale{1.0f}) {}                        // NOLINT
  ScalePolicy(const DynamicScale& scale) : rule_(Rule::kDynamic), dynamic_(scale) {}     // NOLINT
  ScalePolicy(const HeadroomScale& scale) : rule_(Rule::kHeadroom), headroom_(scale) {}  // NOLINT

  HEADROOM_HOST_DEVICE Rule rule() const { return rule_; }

  /// The settings of the rule; null if the policy is another one.
  HEADROOM_HOST_DEVICE const StaticScale* if_static() const {
    return rule_ == Rule::kStatic ? &static_ : nullptr;
  }
  HEADROOM_HOST_DEVICE const DynamicScale* if_dynamic() const {
    return rule_ == Rule::kDynamic ? &dynamic_ : nullptr;
  }
  HEADROOM_HOST_DEVICE const HeadroomScale* if_headroom() const {
    return rule_ == Rule::kHeadroom ? &headroom_ : nullptr;
  }

  /// A copy of the settings, to be changed and made a policy again. Throws Error(kInvalidArgument)
  /// if the policy is another rule.
  HEADROOM_API DynamicScale dynamic() const;

  /// Reads or changes a setting by its name, such as "growth_interval"; flags are 0 or 1. Throws
  /// Error(kInvalidArgument), listing the settings of this policy, for another name, and if the
  /// setting cannot hold the value. Whether the value makes sense is checked by validate().
  HEADROOM_API double get(const std::string& setting) const;
  HEADROOM_API void set(const std::string& setting, double value);

  /// Scales that the policy starts from, and that it allows.
  HEADROOM_API float init_scale() const;
  HEADROOM_API float min_scale() const;
  HEADROOM_API float max_scale() const;
  HEADROOM_API bool allows(float scale) const;

  HEADROOM_API OnOverflow on_overflow() const;

  /// Whether skipped batches are to be retried.
  HEADROOM_HOST_DEVICE bool retries() const { return rule_ == Rule::kHeadroom && headroom_.retry; }

 private:
  friend struct PolicySettings;

  Rule rule_;
  StaticScale static_;
  DynamicScale dynamic_;
  HeadroomScale headroom_;
};

/// One setting of a rule, as documentation and command lines need it.
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

/// The settings of a system that people know, by name: "torch", "apex", "megatron", ... Throws
/// Error(kInvalidArgument), listing all names, for an unknown one.
HEADROOM_API ScalePolicy preset(const std::string& name);

/// A policy as one line of text, for command lines and other languages: a preset, and settings that
/// differ from it: "megatron", "static:512", "torch:growth_interval=500,max_skips_in_row=20".
/// Throws Error(kInvalidArgument) for text that is none, and for an impossible policy.
HEADROOM_API ScalePolicy parse_policy(const std::string& text);

/// The rule and all settings in that form, every number exact.
HEADROOM_API std::string to_string(const ScalePolicy& policy);

struct PresetInfo {
  const char* name;
  const char* summary;
};

/// All presets, in the order of the documentation.
HEADROOM_API const std::vector<PresetInfo>& presets();

/// Throws Error(kInvalidArgument) with a sentence unless every setting is possible.
HEADROOM_API void validate(const ScalePolicy& policy);

enum class Alarm : uint8_t {
  kNone,
  kAtFloor,     // an overflow asked for a smaller scale, and there is none
  kSkipsInRow,  // max_skips_in_row reached
};

/// What the steps between two updates found.
struct StepSeen {
  bool overflow = false;
  double amax = 0.0;  // largest finite magnitude of the gradients, still scaled; 0 if not known
};

namespace internal {
struct ScaleRecord;
}

/// The scale under a policy and everything else that changes while training: what a checkpoint
/// needs. A GradScaler has one; by itself it simulates a policy.
class HEADROOM_API ScaleState {
 public:
  /// The state before the first step. Throws Error(kInvalidArgument) if a setting is impossible.
  explicit ScaleState(const ScalePolicy& policy);

  float scale() const;      // multiplies the next loss
  int64_t steps() const;    // updates so far,
  int64_t skipped() const;  // of which overflows
  int64_t skips_in_row() const;
  const ScalePolicy& policy() const;

  /// Moves on by one update.
  Alarm advance(const StepSeen& seen);

  /// Whether the batch of the last step is to be retried: it was skipped, and the scale is lower
  /// now. Policies without `retry` never say so.
  bool retry() const;

  /// Policy and state as JSON text, every number exact; and back. Missing, unknown or impossible
  /// values throw Error(kBadState).
  std::string save() const;
  static ScaleState load(std::string_view json);

  friend HEADROOM_API bool operator==(const ScaleState& a, const ScaleState& b);
  friend bool operator!=(const ScaleState& a, const ScaleState& b) { return !(a == b); }

  /// For the library itself.
  explicit ScaleState(const internal::ScaleRecord& record);
  const internal::ScaleRecord& record() const { return *record_; }

 private:
  std::shared_ptr<const internal::ScaleRecord> record_;
};

enum class Skip : uint8_t {
  kNo,               // the step is applied
  kNotFinite,        // inf or nan in the gradients
  kUnscaleOverflow,  // finite, but unscaled beyond FP32 or beyond what the optimizer can take
  kNormTooLarge,     // above StepOptions::skip_above_norm
};

}  // namespace headroom

#endif  // HEADROOM_POLICY_H_
