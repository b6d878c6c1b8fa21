// decide/ knows neither tensors nor devices: settings and their checks are here, the state machine
// itself is inline in <headroom/policy.h>.
#include <headroom/policy.h>

#include <cmath>

#include "core/check.h"

namespace headroom {
namespace {

// Where a peer has no floor or ceiling its scale runs to 0 or inf. Ours stops at the last value
// that is safe.
ScalePolicy unbounded() {
  ScalePolicy policy;
  policy.min_scale = kSmallestScale;
  policy.max_scale = kLargestScale;
  return policy;
}

ScalePolicy floor_of_one() {
  ScalePolicy policy = unbounded();
  policy.min_scale = 1.0f;
  return policy;
}

ScalePolicy torch() { return unbounded(); }

ScalePolicy apex() {
  ScalePolicy policy = unbounded();
  policy.max_scale = 0x1p24f;
  return policy;
}

ScalePolicy apex_hysteresis() {
  ScalePolicy policy = unbounded();
  policy.hysteresis = 2;
  policy.refill_on_clean = true;
  return policy;
}

ScalePolicy keras() {
  ScalePolicy policy = unbounded();
  policy.init_scale = 0x1p15f;
  return policy;
}

ScalePolicy tf_keras() {
  ScalePolicy policy = floor_of_one();
  policy.init_scale = 0x1p15f;
  return policy;
}

ScalePolicy mxnet() {
  ScalePolicy policy = unbounded();
  policy.max_scale = 0x1p24f;
  policy.late = true;
  return policy;
}

ScalePolicy megatron() {
  ScalePolicy policy = floor_of_one();
  policy.init_scale = 0x1p32f;
  policy.growth_interval = 1000;
  policy.hysteresis = 2;
  return policy;
}

ScalePolicy deepspeed() {
  ScalePolicy policy = floor_of_one();
  policy.growth_interval = 1000;
  policy.first_growth_extra = 1;
  policy.hysteresis = 2;
  return policy;
}

ScalePolicy fairseq() {
  ScalePolicy policy = unbounded();
  policy.init_scale = 128.0f;
  policy.growth_interval = 1 << 14;
  policy.min_scale = 1e-4f;
  policy.stay_above_min = true;
  return policy;
}

ScalePolicy flax() {
  ScalePolicy policy = unbounded();
  policy.first_growth_extra = 1;
  policy.next_growth_extra = 1;
  return policy;
}

ScalePolicy paddle() {
  ScalePolicy policy = unbounded();
  policy.refill_on_clean = true;
  policy.refill_on_shrink = true;
  return policy;
}

ScalePolicy mindspore() {
  ScalePolicy policy = floor_of_one();
  policy.init_scale = 0x1p24f;
  policy.max_skips_in_row = 1001;
  return policy;
}

ScalePolicy onnxruntime() { return ScalePolicy{}; }

ScalePolicy colossalai() {
  ScalePolicy policy = unbounded();
  policy.growth_interval = 1000;
  policy.hysteresis = 2;
  return policy;
}

ScalePolicy headroom_rerun() {
  HeadroomScale policy;
  policy.rerun = true;
  return policy;
}

struct Preset {
  PresetInfo info;
  ScalePolicy (*make)();
};

const std::vector<Preset>& table() {
  static const std::vector<Preset> presets = {
      {{"dynamic", "Headroom's default: 2^16, x2 after 2000 clean steps, x1/2, from 1 to 2^24"},
       [] { return ScalePolicy{}; }},
      {{"headroom", "set from the largest gradient, as high as it is safe, from 2^-24 to 2^32"},
       [] { return ScalePolicy(HeadroomScale{}); }},
      {{"headroom-rerun",
        "the same where batches that overflow are run again: higher, no batch lost"},
       headroom_rerun},
      {{"static", "a constant scale, 1024 unless set; overflow skips the step"},
       [] { return ScalePolicy(StaticScale{}); }},
      {{"none", "a constant 1, for bf16 and fp32; overflow skips the step"},
       [] { return ScalePolicy(NoScale{}); }},
      {{"torch", "torch.amp.GradScaler"}, torch},
      {{"apex", "apex.amp"}, apex},
      {{"apex-hysteresis",
        "Apex's update_scale_hysteresis kernel: any clean step renews the delay"},
       apex_hysteresis},
      {{"keras", "Keras 3 LossScaleOptimizer"}, keras},
      {{"tf-keras", "tf.keras LossScaleOptimizer and TF DynamicLossScale"}, tf_keras},
      {{"mxnet", "MXNet amp: a new scale comes into force one step late"}, mxnet},
      {{"megatron", "Megatron-LM DynamicGradScaler: only growth renews the delay"}, megatron},
      {{"deepspeed", "DeepSpeed ZeRO DynamicLossScaler: first growth one step late"}, deepspeed},
      {{"fairseq", "fairseq --fp16 on one rank: tolerance, and a floor that is never used"},
       fairseq},
      {{"flax", "flax DynamicScale: every growth one step late"}, flax},
      {{"jmp", "jmp DynamicLossScale"}, tf_keras},
      {{"paddle", "paddle.amp.GradScaler: overflows in a row are counted"}, paddle},
      {{"oneflow", "oneflow.amp.GradScaler"}, floor_of_one},
      {{"mindspore", "MindSpore DynamicLossScaleManager: gives up after 1000 skips in a row"},
       mindspore},
      {{"onnxruntime", "ONNX Runtime training LossScaler"}, onnxruntime},
      {{"colossalai", "Colossal-AI DynamicGradScaler: only growth renews the delay"}, colossalai},
  };
  return presets;
}

void check(bool ok, const char* what, double value, const char* rule) {
  internal::require(ok, ErrorCode::kInvalidArgument, [&] {
    return std::string(what) + " is " + internal::number(value) + "; it has to be " + rule + ".";
  });
}

void check_headroom(const ScalePolicy& policy) {
  constexpr const char* kPower = "a power of two, because grad_limit is set";
  const auto power = [](float scale) {
    int exponent = 0;
    return std::frexp(scale, &exponent) == 0.5f;
  };
  check(policy.grad_limit >= kSmallestScale && std::isfinite(policy.grad_limit), "grad_limit",
        policy.grad_limit,
        "0 (off), or the largest number of the gradients' format, 65504 in FP16");
  check(power(policy.init_scale), "init_scale", policy.init_scale, kPower);
  check(power(policy.min_scale), "min_scale", policy.min_scale, kPower);
  check(power(policy.max_scale), "max_scale", policy.max_scale, kPower);
  check(policy.peak_window >= 1 && policy.peak_window <= 65536, "peak_window", policy.peak_window,
        "a number of steps, from 1 to 65536");
  check(policy.growth_interval <= 1 << 20, "growth_interval", policy.growth_interval,
        "1048576 or less, because grad_limit is set");
  check(policy.retry_interval >= 2 && policy.retry_interval <= 1 << 18, "retry_interval",
        policy.retry_interval, "a number of steps, from 2 to 262144");
  const ScalePolicy defaults;
  constexpr const char* kUnused = "the default, because grad_limit sets another rule";
  check(policy.growth_factor == defaults.growth_factor, "growth_factor", policy.growth_factor,
        kUnused);
  check(policy.backoff_factor == defaults.backoff_factor, "backoff_factor", policy.backoff_factor,
        kUnused);
  check(policy.first_growth_extra == 0, "first_growth_extra", policy.first_growth_extra, kUnused);
  check(policy.next_growth_extra == 0, "next_growth_extra", policy.next_growth_extra, kUnused);
  check(policy.hysteresis == 1, "hysteresis", policy.hysteresis, kUnused);
  check(policy.tolerance == 0.0, "tolerance", policy.tolerance, kUnused);
  check(!policy.late, "late", policy.late, kUnused);
  check(!policy.stay_above_min, "stay_above_min", policy.stay_above_min, kUnused);
}

bool is_scale(float value) { return value >= kSmallestScale && value <= kLargestScale; }

}  // namespace

StaticScale::operator ScalePolicy() const {
  ScalePolicy policy = unbounded();
  policy.dynamic = false;
  policy.init_scale = scale;
  policy.on_overflow = on_overflow;
  policy.max_skips_in_row = max_skips_in_row;
  return policy;
}

HeadroomScale::operator ScalePolicy() const {
  ScalePolicy policy;
  policy.grad_limit = grad_limit;
  policy.init_scale = init_scale;
  policy.min_scale = min_scale;
  policy.max_scale = max_scale;
  policy.growth_interval = growth_interval;
  policy.on_overflow = on_overflow;
  policy.max_skips_in_row = max_skips_in_row;
  policy.rerun = rerun;
  return policy;
}

ScalePolicy preset(const std::string& name) {
  std::string known;
  for (const Preset& preset : table()) {
    if (name == preset.info.name) return preset.make();
    known += (known.empty() ? "" : ", ") + std::string(preset.info.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "There is no preset '" + name + "'; take one of " + known + ".");
}

const std::vector<PresetInfo>& presets() {
  static const std::vector<PresetInfo> infos = [] {
    std::vector<PresetInfo> list;
    for (const Preset& preset : table()) list.push_back(preset.info);
    return list;
  }();
  return infos;
}

void validate(const ScalePolicy& policy) {
  constexpr const char* kScaleRule = "a number from 2^-126 to 2^126, so that 1/scale is safe too";
  check(is_scale(policy.init_scale), "init_scale", policy.init_scale, kScaleRule);
  check(is_scale(policy.min_scale), "min_scale", policy.min_scale, kScaleRule);
  check(is_scale(policy.max_scale), "max_scale", policy.max_scale, kScaleRule);
  check(policy.max_scale >= policy.min_scale, "max_scale", policy.max_scale, "min_scale or more");
  check(policy.init_scale <= policy.max_scale, "init_scale", policy.init_scale,
        "max_scale or less; raise max_scale or start lower");
  check(policy.stay_above_min ? policy.init_scale > policy.min_scale
                              : policy.init_scale >= policy.min_scale,
        "init_scale", policy.init_scale,
        policy.stay_above_min ? "above min_scale"
                              : "min_scale or more; lower min_scale or start higher");
  constexpr double kLeast = 1e-6;  // a smaller change is lost in FP32's rounding
  check(policy.growth_factor >= 1.0 + kLeast && policy.growth_factor <= kLargestScale,
        "growth_factor", policy.growth_factor, "a finite number above 1, by 1e-6 at least");
  check(policy.backoff_factor >= kSmallestScale && policy.backoff_factor <= 1.0 - kLeast,
        "backoff_factor", policy.backoff_factor, "above 0 and below 1, by 1e-6 at least");
  check(policy.growth_interval >= 1, "growth_interval", policy.growth_interval, "1 or more");
  check(policy.hysteresis >= 1, "hysteresis", policy.hysteresis, "1 (shrink at once) or more");
  check(policy.tolerance >= 0.0 && policy.tolerance <= 1.0, "tolerance", policy.tolerance,
        "a share of steps, from 0 to 1");
  check(policy.first_growth_extra >= 0, "first_growth_extra", policy.first_growth_extra,
        "0 or more");
  check(policy.next_growth_extra >= 0, "next_growth_extra", policy.next_growth_extra, "0 or more");
  check(policy.max_skips_in_row >= 0, "max_skips_in_row",
        static_cast<double>(policy.max_skips_in_row), "0 (no alarm) or more");
  if (policy.grad_limit != 0.0) check_headroom(policy);
  check(!policy.rerun || policy.grad_limit != 0.0, "rerun", policy.rerun,
        "0, because grad_limit is not set; only Headroom's rule knows of it");
  check(!policy.rerun || (policy.dynamic && policy.on_overflow == OnOverflow::kSkip), "rerun",
        policy.rerun, "0 where the scale does not move, or an overflow throws");
}

}  // namespace headroom
