// The presets: settings that reproduce the scalers of other systems. tests/decide/presets_test.cc
// has the trajectory of scales that each of them must follow.
#include <headroom/policy.h>

#include "core/check.h"

namespace headroom {
namespace {

// Where another system has no floor or ceiling, its scale can reach 0 or inf. Ours stops at the
// last value with a normal reciprocal.
constexpr float kNoFloor = kSmallestScale;
constexpr float kNoCeiling = kLargestScale;

struct Preset {
  const char* name;
  const char* summary;
  ScalePolicy policy;
};

// In the order of the documentation: Headroom's own, then those of other systems.
constexpr Preset kPresets[] = {
    {"dynamic", "the default of C++ and C: 2^16, x2 after 2000 clean steps, x1/2, from 1 to 2^24",
     DynamicScale{}},
    {"headroom", "set from the largest gradient, as high as it is safe, from 2^-24 to 2^32",
     HeadroomScale{}},
    {"headroom-retry", "the same where skipped batches are retried: higher, no batch lost",
     HeadroomScale{.retry = true}},
    {"static", "a constant scale, 1024 unless set; overflow skips the step", StaticScale{}},
    {"none", "a constant 1, for bf16 and fp32; overflow skips the step", NoScale{}},
    {"torch", "torch.amp.GradScaler", DynamicScale{.min_scale = kNoFloor, .max_scale = kNoCeiling}},
    {"precision-rl", "Precision-RL and verl on FSDP: torch's rule, x2 after 400 clean steps",
     DynamicScale{.growth_interval = 400, .min_scale = kNoFloor, .max_scale = kNoCeiling}},
    {"apex", "apex.amp", DynamicScale{.min_scale = kNoFloor, .max_scale = 0x1p24f}},
    {"apex-hysteresis", "Apex's update_scale_hysteresis kernel: any clean step renews the delay",
     DynamicScale{
         .min_scale = kNoFloor, .max_scale = kNoCeiling, .hysteresis = 2, .refill_on_clean = true}},
    {"keras", "Keras 3 LossScaleOptimizer",
     DynamicScale{.init_scale = 0x1p15f, .min_scale = kNoFloor, .max_scale = kNoCeiling}},
    {"tf-keras", "tf.keras LossScaleOptimizer and TF DynamicLossScale",
     DynamicScale{.init_scale = 0x1p15f, .max_scale = kNoCeiling}},
    {"mxnet", "MXNet amp: a new scale is used one step late",
     DynamicScale{.min_scale = kNoFloor, .max_scale = 0x1p24f, .late = true}},
    {"megatron", "Megatron-LM DynamicGradScaler: only growth renews the delay",
     DynamicScale{
         .init_scale = 0x1p32f, .growth_interval = 1000, .max_scale = kNoCeiling, .hysteresis = 2}},
    {"verl-megatron", "verl on Megatron: Megatron's rule from 2^15",
     DynamicScale{
         .init_scale = 0x1p15f, .growth_interval = 1000, .max_scale = kNoCeiling, .hysteresis = 2}},
    {"deepspeed", "DeepSpeed ZeRO DynamicLossScaler: first growth one step late",
     DynamicScale{.growth_interval = 1000,
                  .max_scale = kNoCeiling,
                  .hysteresis = 2,
                  .first_growth_extra = 1}},
    {"fairseq", "fairseq --fp16 on one rank: tolerance, and a floor that is never used",
     DynamicScale{.init_scale = 128.0f,
                  .growth_interval = 1 << 14,
                  .min_scale = 1e-4f,
                  .max_scale = kNoCeiling,
                  .stay_above_min = true}},
    {"fairseq2", "fairseq2 StandardFloat16LossScaler: torch's rule with a floor of 1e-4",
     DynamicScale{.min_scale = 1e-4f, .max_scale = kNoCeiling}},
    {"icefall", "icefall: torch's rule from 1; small scales double on a schedule",
     DynamicScale{.init_scale = 1.0f,
                  .min_scale = 1e-5f,
                  .max_scale = kNoCeiling,
                  .stay_above_min = true,
                  .double_when_small = true}},
    {"flax", "flax DynamicScale: every growth one step late",
     DynamicScale{.min_scale = kNoFloor,
                  .max_scale = kNoCeiling,
                  .first_growth_extra = 1,
                  .next_growth_extra = 1}},
    {"jmp", "jmp DynamicLossScale", DynamicScale{.init_scale = 0x1p15f, .max_scale = kNoCeiling}},
    {"paddle", "paddle.amp.GradScaler: overflows in a row are counted",
     DynamicScale{.min_scale = kNoFloor,
                  .max_scale = kNoCeiling,
                  .refill_on_clean = true,
                  .refill_on_shrink = true}},
    {"oneflow", "oneflow.amp.GradScaler", DynamicScale{.max_scale = kNoCeiling}},
    {"mindspore", "MindSpore DynamicLossScaleManager: gives up after 1000 skips in a row",
     DynamicScale{.init_scale = 0x1p24f, .max_scale = kNoCeiling, .max_skips_in_row = 1001}},
    {"onnxruntime", "ONNX Runtime training LossScaler", DynamicScale{}},
    {"colossalai", "Colossal-AI DynamicGradScaler: only growth renews the delay",
     DynamicScale{
         .growth_interval = 1000, .min_scale = kNoFloor, .max_scale = kNoCeiling, .hysteresis = 2}},
};

}  // namespace

ScalePolicy preset(const std::string& name) {
  std::string known;
  for (const Preset& preset : kPresets) {
    if (name == preset.name) return preset.policy;
    known += (known.empty() ? "" : ", ") + std::string(preset.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "There is no preset '" + name + "'; use one of " + known + ".");
}

const std::vector<PresetInfo>& presets() {
  static const std::vector<PresetInfo> infos = [] {
    std::vector<PresetInfo> list;
    for (const Preset& preset : kPresets) list.push_back({preset.name, preset.summary});
    return list;
  }();
  return infos;
}

}  // namespace headroom
