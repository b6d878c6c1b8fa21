// Runs every fault of the table in docs/reliability.md with Headroom and prints one JSON object per
// line. Exits with 1 if weights, state or a checkpoint were corrupted or a fault was not reported.
//     headroom_reliability
// scripts/reliability-table writes the table. A new row needs a function and an entry in kFaults.
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "tests/reliability/faults.h"

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One weight tensor of ones and SGD with a learning rate of 0.1.
struct Model {
  std::vector<float> w = std::vector<float>(4, 1.0f), g = std::vector<float>(4, 0.0f);
  hr::SGD optimizer;
  hr::GradScaler scaler;
  std::string alarm;

  explicit Model(const hr::ScalePolicy& policy = hr::preset("torch"), double momentum = 0.0)
      : optimizer({{"w", hr::view(w), hr::view(g)}}, {.lr = 0.1, .momentum = momentum}),
        scaler(policy, {.on_alarm = [this](const hr::AlarmReport& r) { alarm = r.sentence; }}) {}

  void backward(float grad) { g.assign(4, scaler.scale(1.0f) * grad); }
  hr::StepReport step(float grad) {
    backward(grad);
    const hr::StepReport report = scaler.step(optimizer);
    scaler.update();
    return report;
  }
  void expect_weight(double expected) const {
    for (const float x : w) {
      expect(std::fabs(x - expected) < 1e-6,
             "a weight is " + std::to_string(x) + " and not " + std::to_string(expected));
    }
  }
};

Outcome expect_skipped(const hr::StepReport& report) {
  expect(!report.applied && !report.culprit.empty(), "applied");
  return {"reported", report.to_string()};
}

Outcome overflows_in_a_row() {
  Model model;
  for (int i = 0; i < 145; ++i) model.step(kInf);
  expect(!model.alarm.empty(), "nothing was reported");
  model.step(1.0f);
  model.expect_weight(0.9);
  return {"reported", "every step; the scale stays at or above 2^-126 and the clean step is right"};
}

Outcome first_momentum_step_overflows() {
  Model model(hr::preset("torch"), 0.9);
  const Outcome outcome = expect_skipped(model.step(kInf));
  model.step(1.0f);
  model.expect_weight(0.9);
  return outcome;
}

Outcome nan_after_unscale() {
  Model model;
  model.backward(1.0f);
  model.scaler.unscale_(model.optimizer);
  model.g[0] = kNan;
  const Outcome outcome = expect_skipped(model.scaler.step(model.optimizer));
  model.expect_weight(1.0);
  return outcome;
}

Outcome scale_of_zero() {
  return expect_refusal([] { hr::GradScaler scaler(hr::DynamicScale{.init_scale = 0.0f}); });
}

Outcome scale_loaded(const char* value) {
  hr::GradScaler scaler;
  const std::string before = scaler.save();
  std::string text = before;
  const size_t at = text.rfind("\"scale\": 65536.0");
  expect(at != std::string::npos, "unexpected format of a saved scaler");
  text.replace(at, 16, std::string("\"scale\": ") + value);
  const Outcome outcome = expect_refusal([&] { scaler.load(text); });
  expect(scaler.save() == before, "the state is partly changed");
  return outcome;
}
Outcome scale_of_nan_loaded() { return scale_loaded("NaN"); }
Outcome scale_of_zero_loaded() { return scale_loaded("0.0"); }

Outcome scale_set_to_nan() {
  hr::GradScaler scaler;
  return expect_refusal([&] { scaler.set_scale(kNan); });
}

Outcome parameter_in_two_optimizers() {
  Model model;
  hr::SGD second({{"w", hr::view(model.w), hr::view(model.g)}}, {.lr = 0.1});
  model.backward(1.0f);
  model.scaler.step(model.optimizer);
  const Outcome outcome = expect_refusal([&] { model.scaler.step(second); });
  model.expect_weight(0.9);
  return outcome;
}

Outcome unscaling_overflows() {
  Model model(hr::StaticScale{0x1p-20f});
  model.backward(1.0f);
  model.g.assign(4, 1e36f);
  const hr::StepReport report = model.scaler.step(model.optimizer);
  expect(report.skip == hr::Skip::kUnscaleOverflow, "not detected");
  model.expect_weight(1.0);
  return {"reported", report.to_string()};
}

Outcome fp16_loss_times_scale() {
  Model model;
  const float scaled = model.scaler.scale(hr::f16(4.0f));
  expect(scaled == 4.0f * 65536.0f, "inf");
  return {"fine", "computed in FP32"};
}

Outcome norm_overflows_finite_gradients() {
  Model model(hr::NoScale{});
  model.g.assign(4, 1e30f);
  model.scaler.scale(1.0f);
  const hr::StepReport report = model.scaler.step(model.optimizer, {.max_norm = 1.0f});
  expect(report.applied && std::fabs(report.grad_norm - 2e30) < 1e24, "the norm is wrong");
  model.expect_weight(0.95);
  return {"fine", "the norm is 2e30, and clipping to 1 works"};
}

Outcome state_with_a_missing_key() {
  hr::GradScaler scaler;
  const std::string before = scaler.save();
  auto state = nlohmann::json::parse(before);
  state["state"]["scale"] = 8.0;
  state["state"].erase("growth_tracker");
  const Outcome outcome = expect_refusal([&] { scaler.load(state.dump()); });
  expect(scaler.save() == before, "the state is partly changed");
  return outcome;
}

Outcome growth_interval_negative() {
  return expect_refusal([] { hr::GradScaler scaler(hr::DynamicScale{.growth_interval = -1}); });
}

Outcome growth_interval_shortened() {
  Model model;
  for (int i = 0; i < 10; ++i) model.step(0.001f);
  hr::ScalePolicy policy = model.scaler.policy();
  policy.set("growth_interval", 5);
  model.scaler.set_policy(policy);
  for (int i = 0; i < 20; ++i) model.step(0.001f);
  expect(model.scaler.get_scale() > 65536.0f, "the scale never grows again");
  return {"fine", "the scale grows after the next clean step"};
}

Outcome backoff_factor_negative() {
  return expect_refusal([] { hr::GradScaler scaler(hr::DynamicScale{.backoff_factor = -1.0f}); });
}

Outcome unscale_twice() {
  Model model;
  model.backward(1.0f);
  model.scaler.unscale_(model.optimizer);
  const Outcome outcome = expect_refusal([&] { model.scaler.unscale_(model.optimizer); });
  model.scaler.step(model.optimizer);
  model.expect_weight(0.9);
  return outcome;
}

Outcome step_twice() {
  Model model;
  model.backward(1.0f);
  model.scaler.step(model.optimizer);
  const Outcome outcome = expect_refusal([&] { model.scaler.step(model.optimizer); });
  model.expect_weight(0.9);
  return outcome;
}

Outcome update_without_step() {
  Model model;
  model.backward(1.0f);
  return expect_refusal([&] { model.scaler.update(); });
}

Outcome step_without_gradients() {
  std::vector<float> w(4, 1.0f);
  hr::SGD optimizer({{"w", hr::view(w), {}}}, {.lr = 0.1});
  hr::GradScaler scaler;
  scaler.scale(1.0f);
  return expect_refusal([&] { scaler.step(optimizer); });
}

Outcome accumulation_over_a_scale_change() {
  Model model;
  std::vector<float> w2(1, 1.0f), g2(1);
  hr::SGD second({{"other", hr::view(w2), hr::view(g2)}}, {.lr = 0.1});
  model.backward(1.0f);
  g2[0] = model.scaler.get_scale();
  model.scaler.step(model.optimizer);
  model.scaler.step(second);
  model.scaler.update();
  model.backward(1.0f);  // the first micro-batch of w; the other optimizer continues
  g2[0] = kInf;
  model.scaler.step(second);
  model.scaler.update();
  const float now = model.scaler.scale(1.0f);  // the second micro-batch, with half the scale
  for (float& x : model.g) x += now;
  model.scaler.step(model.optimizer);
  model.expect_weight(0.7);
  return {"fine", "accumulated gradients are rescaled to the new scale"};
}

Outcome saved_between_step_and_update() {
  Model model;
  model.backward(kInf);
  model.scaler.step(model.optimizer);
  return expect_refusal([&] { model.scaler.save(); });
}

template <typename T>
Outcome run_bad_gradient(float bad) {
  std::vector<T> w(4, T(1.0f)), g(4, T(1.0f));
  hr::AdamW optimizer({{"w", hr::view(w), hr::view(g)}});
  hr::GradScaler scaler;
  scaler.scale(1.0f);
  g[2] = T(bad);
  const Outcome outcome = expect_skipped(scaler.step(optimizer));
  for (const T x : w) expect(static_cast<float>(x) == 1.0f, "a weight has changed");
  expect(optimizer.steps(0) == 0, "the step was counted");
  return outcome;
}
Outcome nan_in_bf16_gradients() { return run_bad_gradient<hr::bf16>(kNan); }
Outcome minus_inf_only() { return run_bad_gradient<hr::f16>(-kInf); }

Outcome fp16_gradients() {
  std::vector<hr::f16> w(4, hr::f16(1.0f)), g(4);
  hr::SGD optimizer({{"w", hr::view(w), hr::view(g)}}, {.lr = 1e4});
  hr::GradScaler scaler;
  const float scale = scaler.scale(1.0f);
  g.assign(4, hr::f16(scale * 1e-8f));  // 1e-8 underflows in FP16
  scaler.step(optimizer);
  expect(std::fabs(optimizer.master(0)[0] - (1.0f - 1e-4f)) < 1e-7f, "lost");
  return {"fine", "read scaled and not written: a gradient of 1e-8 reaches the FP32 master"};
}

Outcome growth_to_inf() {
  hr::ScalePolicy policy = hr::preset("torch");
  policy.set("growth_interval", 1);
  Model model(policy);
  for (int i = 0; i < 300; ++i) model.step(0.0f);
  const float scale = model.scaler.get_scale();
  expect(std::isfinite(scale) && std::isnormal(1.0f / scale), "out of range");
  return {"fine", "stops at 2^126, whose reciprocal is a normal number"};
}

Outcome every_step_overflows() {
  Model model(hr::DynamicScale{});
  for (int i = 0; i < 200 && model.alarm.empty(); ++i) model.step(kInf);
  expect(!model.alarm.empty() && model.scaler.get_scale() >= 1.0f, "nothing was reported");
  model.expect_weight(1.0);
  return {"reported", model.alarm.substr(0, model.alarm.find(". "))};
}

Outcome loss_is_nan() {
  Model model;
  const Outcome outcome = expect_skipped(model.step(kNan));
  model.expect_weight(1.0);
  return outcome;
}

Outcome inf_under_disabled_scaler() {
  Model model;
  hr::GradScaler scaler(hr::DynamicScale{}, {.enabled = false});
  model.g.assign(4, kInf);
  const Outcome outcome = expect_skipped(scaler.step(model.optimizer));
  model.expect_weight(1.0);
  return outcome;
}

Outcome threads_with_separate_scalers() {
  std::vector<float> results(4);
  std::vector<std::thread> threads;
  for (float& result : results) {
    threads.emplace_back([&result] {
      Model model;
      for (int i = 0; i < 50; ++i) model.step(0.01f);
      result = model.w[0];
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const float result : results) expect(result == results[0], "results differ");
  return {"fine", ""};
}

struct Row {
  const char* id;  // as in pytorch.json
  const char* fault;
  Outcome (*run)();
};

const Row kFaults[] = {
    {"overflows-in-a-row", "145 overflows in a row, then a clean step", overflows_in_a_row},
    {"first-momentum-step-overflows", "fused SGD with momentum whose first step overflows",
     first_momentum_step_overflows},
    {"nan-after-unscale", "a gradient becomes NaN between `unscale_` and `step`",
     nan_after_unscale},
    {"scale-of-zero", "a scale of 0 given to the constructor", scale_of_zero},
    {"scale-of-zero-loaded", "a scale of 0 in a saved state", scale_of_zero_loaded},
    {"scale-of-nan-loaded", "a scale of NaN in a saved state", scale_of_nan_loaded},
    {"scale-set-to-nan", "a scale set to NaN", scale_set_to_nan},
    {"parameter-in-two-optimizers", "a parameter in two optimizers", parameter_in_two_optimizers},
    {"unscaling-overflows", "a scale of 2^-20, and unscaling overflows", unscaling_overflows},
    {"fp16-loss-times-scale", "an FP16 loss that leaves FP16's range when scaled",
     fp16_loss_times_scale},
    {"norm-overflows-finite-gradients", "finite gradients of 1e30 whose norm is clipped",
     norm_overflows_finite_gradients},
    {"state-with-a-missing-key", "a saved state without its growth count",
     state_with_a_missing_key},
    {"saved-between-step-and-update",
     "a state saved between `step` and `update`, after an overflow", saved_between_step_and_update},
    {"growth-interval-negative", "a growth interval of -1", growth_interval_negative},
    {"growth-interval-shortened", "a growth interval shortened below the current count",
     growth_interval_shortened},
    {"backoff-factor-negative", "a backoff factor of -1", backoff_factor_negative},
    {"growth-to-inf", "300 growths in a row", growth_to_inf},
    {"every-step-overflows", "every step overflows", every_step_overflows},
    {"unscale-twice", "`unscale_` twice", unscale_twice},
    {"step-twice", "`step` twice", step_twice},
    {"update-without-step", "`update` without a step", update_without_step},
    {"step-without-gradients", "`step` without any gradient", step_without_gradients},
    {"accumulation-over-a-scale-change", "micro-batches accumulated across a change of the scale",
     accumulation_over_a_scale_change},
    {"nan-in-bf16-gradients", "NaN in a BF16 gradient", nan_in_bf16_gradients},
    {"minus-inf-only", "-inf without any +inf or NaN", minus_inf_only},
    {"fp16-gradients", "FP16 gradients that underflow when unscaled", fp16_gradients},
    {"loss-is-nan", "the loss is NaN", loss_is_nan},
    {"inf-under-disabled-scaler", "inf under a disabled scaler", inf_under_disabled_scaler},
    {"inf-past-two-to-the-31", "inf in the last of 2^31 + 77 elements", inf_past_two_to_the_31},
    {"gradient-of-another-size", "a gradient of another size than its weight",
     gradient_of_another_size},
    {"gradient-moved", "a gradient at another address in each step", gradient_moved},
    {"gradient-cut-to-one-element", "a gradient truncated to one element before `step`",
     gradient_cut_to_one_element},
    {"gradient-without-memory", "a gradient whose memory was freed (null pointer)",
     gradient_without_memory},
    {"gradient-of-another-type", "an FP16 gradient for an FP32 weight", gradient_of_another_type},
    {"gradient-on-another-device", "a gradient on another device than its weight",
     gradient_on_another_device},
    {"gradient-of-two-parameters", "two parameters with the same gradient tensor",
     gradient_of_two_parameters},
    {"same-parameter-listed-twice", "a parameter twice in one optimizer",
     same_parameter_listed_twice},
    {"optimizer-state-of-another-model", "an optimizer's state from a model of other sizes",
     optimizer_state_of_another_model},
    {"optimizer-state-in-another-order",
     "an optimizer's state from a model with its layers in another order",
     optimizer_state_in_another_order},
    {"threads-with-separate-scalers", "four threads, each with its own scaler",
     threads_with_separate_scalers},
    {"rank-overflows-before-averaging", "two ranks: one overflows, then gradients are averaged",
     rank_overflows_before_averaging},
    {"rank-overflows-after-averaging",
     "two ranks: gradients are averaged, then one rank gets an inf",
     rank_overflows_after_averaging},
    {"rank-overflows-in-its-shard", "two ranks with a shard each: one overflows",
     rank_overflows_in_its_shard},
    {"rank-without-gradients", "two ranks with a shard each: one has no gradients",
     rank_without_gradients},
    {"rank-dies", "two ranks: one dies", rank_dies},
    {"rank-omits-a-step", "two ranks: one omits a `step` after backward", rank_omits_a_step},
    {"rank-has-one-batch-less", "two ranks: one has one batch less", rank_has_one_batch_less},
    {"ranks-start-with-different-scales", "two ranks: they start with different scales",
     ranks_start_with_different_scales},
    {"checkpoint-truncated", "a truncated checkpoint", checkpoint_truncated},
    {"checkpoint-with-a-flipped-bit", "a flipped bit in a checkpoint",
     checkpoint_with_a_flipped_bit},
    {"disk-full-while-saving", "the disk is full while a checkpoint is saved",
     disk_full_while_saving},
    {"killed-while-saving", "the process is killed while a checkpoint is saved",
     killed_while_saving},
};

}  // namespace

int main() {
  bool broken = false;
  for (const Row& row : kFaults) {
    Outcome outcome;
    try {
      outcome = row.run();
    } catch (const BrokenPromise& promise) {
      outcome = {"corrupted", promise.what};
    } catch (const std::exception& error) {
      outcome = {"corrupted", std::string("unexpected error: ") + error.what()};
    }
    broken |= outcome.word == std::string("corrupted");
    const nlohmann::ordered_json line = {
        {"id", row.id}, {"fault", row.fault}, {"outcome", outcome.word}, {"what", outcome.what}};
    std::printf("%s\n", line.dump().c_str());
  }
  return broken ? 1 : 0;
}
