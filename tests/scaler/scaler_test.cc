// One step of GradScaler, from the scaled loss to the updated weights.
#include "scaler/scaler.h"

#include "tests/float_mode.h"
#include "tests/scaler/support.h"

namespace headroom {
namespace {

TEST(Step, AppliesGradientsThatWouldUnderflowUnscaled) {
  Loop unscaled({.lr = 1e4}), scaled({.lr = 1e4});
  GradScaler no_scale(NoScale{}), scaler;
  const float tiny = 1e-8f;  // rounds to zero in FP16
  unscaled.backward(no_scale.scale(1.0f), tiny);
  scaled.backward(scaler.scale(1.0f), tiny);
  EXPECT_TRUE(no_scale.step(unscaled.optimizer).applied);
  EXPECT_TRUE(scaler.step(scaled.optimizer).applied);
  EXPECT_EQ(unscaled.optimizer.master(0)[0], 1.0f) << "the gradient underflowed";
  EXPECT_NEAR(scaled.optimizer.master(0)[0], 1.0 - 1e-4, 1e-7);
}

TEST(Step, OverflowSkipsTheStepLowersTheScaleAndClearsGradients) {
  Loop loop({.lr = 1.0, .momentum = 0.9});
  GradScaler scaler;
  loop.backward(scaler.scale(1.0f), 2.0f);  // 131072 overflows FP16
  const StepReport report = scaler.step(loop.optimizer);
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.skip, Skip::kNotFinite);
  EXPECT_EQ(report.scale, 65536.0f);
  EXPECT_EQ(report.culprit, "w: 3 inf, 0 nan");
  EXPECT_EQ(report.to_string(), "skipped at scale 65536: w: 3 inf, 0 nan");
  EXPECT_EQ(loop.optimizer.steps(0), 0);
  EXPECT_EQ(static_cast<float>(loop.weight[0]), 1.0f);
  EXPECT_EQ(bytes_of(loop.grad), std::vector<unsigned char>(6, 0));
  scaler.update();
  EXPECT_EQ(scaler.scale(1.0f), 32768.0f) << "the next pass uses the new scale";
}

TEST(Step, BatchCanBeRepeatedUntilApplied) {
  for (const ScalePolicy& policy : {preset("headroom"), preset("torch"), preset("mxnet")}) {
    Loop loop, reference;
    GradScaler scaler(policy), reference_scaler(StaticScale{1.0f});
    for (const float gradient :
         {0.25f, 100.0f, 0.125f}) {  // 100 overflows at scales of 2^10 and above
      StepReport report;
      do {
        loop.backward(scaler.scale(1.0f), gradient);
        report = scaler.step(loop.optimizer);
        scaler.update();
      } while (!report.applied);
      reference.backward(reference_scaler.scale(1.0f), gradient);
      reference_scaler.step(reference.optimizer);
      reference_scaler.update();
    }
    EXPECT_GT(scaler.state().skipped(), 0);
    EXPECT_EQ(loop.optimizer.steps(0), 3);
    EXPECT_EQ(loop.optimizer.master(0)[0], reference.optimizer.master(0)[0]);
  }
}

TEST(Step, RetryPolicyRequestsRetriesUntilTheBatchFits) {
  Loop loop, reference;
  GradScaler scaler(preset("headroom-retry")), reference_scaler(StaticScale{1.0f}),
      off(preset("headroom-retry"), {.enabled = false});
  EXPECT_FALSE(scaler.retry());
  EXPECT_FALSE(off.retry());
  std::vector<int> passes;
  for (const float gradient :
       {0.25f, 100.0f, kNan, 0.125f}) {  // 100 overflows at scales of 2^10 and above
    passes.push_back(0);
    do {
      loop.backward(scaler.scale(1.0f), gradient);
      scaler.step(loop.optimizer);
      scaler.update();
      ++passes.back();
    } while (scaler.retry());
    reference.backward(reference_scaler.scale(1.0f), gradient);
    reference_scaler.step(reference.optimizer);
    reference_scaler.update();
  }
  EXPECT_EQ(passes[0], 1);
  EXPECT_GT(passes[1], 1);
  EXPECT_LE(passes[2], 8) << "no scale helps against NaN";
  EXPECT_EQ(passes[3], 1);
  EXPECT_EQ(loop.optimizer.steps(0), 3);
  EXPECT_EQ(loop.optimizer.master(0)[0], reference.optimizer.master(0)[0]);
}

TEST(Step, RetryPolicyRejectsSecondOptimizersAndAccumulators) {
  Loop first, second;
  GradScaler scaler(preset("headroom-retry"));
  for (Loop* const loop : {&first, &second}) loop->backward(scaler.scale(1.0f), 0.25f);
  scaler.step(first.optimizer);
  expect_error(ErrorCode::kUnsupported, "second optimizer", [&] { scaler.step(second.optimizer); });
  EXPECT_EQ(second.optimizer.steps(0), 0);
  scaler.update();
  second.backward(scaler.scale(1.0f), 0.25f);
  EXPECT_TRUE(scaler.step(second.optimizer).applied) << "in a round without another optimizer";
  scaler.update();

  std::vector<f16> weight(3), grad(3);
  GradAccumulator sums({{"w", view(weight), view(grad)}});
  scaler.scale(1.0f);
  expect_error(ErrorCode::kUnsupported, "GradAccumulator", [&] { scaler.step(sums); });
}

TEST(Step, OverflowInTheFirstStepLeavesNoMomentum) {
  Loop loop({.lr = 1.0, .momentum = 0.9, .dampening = 0.5});
  GradScaler scaler;
  loop.backward(scaler.scale(1.0f), kNan);
  EXPECT_FALSE(scaler.step(loop.optimizer).applied);
  scaler.update();
  loop.backward(scaler.scale(1.0f), 0.25f);
  EXPECT_TRUE(scaler.step(loop.optimizer).applied);
  EXPECT_EQ(loop.optimizer.master(0)[0], 0.75f)
      << "dampening is not used in the first applied step";
}

TEST(Step, ClipsTheUnscaledNorm) {
  Loop loop;
  GradScaler scaler(StaticScale{1024.0f});
  loop.backward(scaler.scale(1.0f), 4.0f);
  const StepReport report = scaler.step(loop.optimizer, {.max_norm = 1.0f});
  EXPECT_NEAR(report.grad_norm, 4.0 * std::sqrt(3.0), 1e-9);
  EXPECT_NEAR(report.clip_factor, 1.0 / (4.0 * std::sqrt(3.0) + 1e-6), 1e-12);
  EXPECT_NEAR(loop.optimizer.master(0)[0], 1.0 - 1.0 / std::sqrt(3.0), 1e-6);
}

TEST(Step, ClearsGradientsAsRequested) {
  for (const ClearGrads clear : {ClearGrads::kOnSkip, ClearGrads::kAlways, ClearGrads::kNever}) {
    for (const bool overflow : {false, true}) {
      Loop loop;
      GradScaler scaler(StaticScale{1.0f});
      loop.backward(scaler.scale(1.0f), overflow ? kInf : 0.5f);
      scaler.step(loop.optimizer, {.clear_grads = clear});
      const bool cleared = (loop.grad[0].bits == 0);
      EXPECT_EQ(cleared,
                clear == ClearGrads::kAlways || (clear == ClearGrads::kOnSkip && overflow));
    }
  }
}

TEST(Step, OverflowWhileUnscalingIsSkipped) {
  std::vector<float> weight = {1.0f}, grad = {1e38f};
  SGD optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler(StaticScale{0x1p-10f});
  scaler.scale(1.0f);
  const StepReport report = scaler.step(optimizer);
  EXPECT_EQ(report.skip, Skip::kUnscaleOverflow);
  EXPECT_EQ(weight[0], 1.0f);
  EXPECT_EQ(report.culprit, "w: 1e+38 / 0.000976562 is beyond FP32");
}

TEST(Step, AdamSkipsGradientsWhoseSquaresOverflowUnlessClipped) {
  std::vector<float> weight = {1.0f}, grad = {2e19f};
  AdamW optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler(NoScale{});
  scaler.scale(1.0f);
  const StepReport report = scaler.step(optimizer, {.clear_grads = ClearGrads::kNever});
  EXPECT_EQ(report.skip, Skip::kUnscaleOverflow);
  EXPECT_NE(report.culprit.find("beyond 2^63"), std::string::npos) << report.culprit;
  scaler.update();
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 1.0f}).applied);
  scaler.update();
  grad[0] = 9e18f;
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_NO_THROW(optimizer.load_state(optimizer.state())) << "the state is finite";
}

TEST(Step, FiniteGradientsWithALargeNormAreClippedAndApplied) {
  std::vector<float> weight(1000, 1.0f), grad(1000, 1e30f);
  SGD optimizer({{"w", view(weight), view(grad)}}, {.lr = 1.0});
  GradScaler scaler(NoScale{});
  scaler.scale(1.0f);
  const StepReport report = scaler.step(optimizer, {.max_norm = 1.0f});
  EXPECT_TRUE(report.applied);
  EXPECT_NEAR(weight[0], 1.0 - 1.0 / std::sqrt(1000.0), 1e-6);
}

TEST(Step, ThrownOverflowLeavesWeightsUnchangedAndTrainingCanContinue) {
  Loop loop;
  GradScaler scaler(StaticScale{.scale = 128.0f, .on_overflow = OnOverflow::kThrow});
  loop.backward(scaler.scale(1.0f), kInf);
  expect_error(ErrorCode::kOverflow, "w: 3 inf", [&] { scaler.step(loop.optimizer); });
  EXPECT_EQ(static_cast<float>(loop.weight[0]), 1.0f);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 128.0f);
  loop.backward(scaler.scale(1.0f), 0.5f);
  EXPECT_TRUE(scaler.step(loop.optimizer).applied);
}

TEST(Step, IgnoresTheCallersFloatingPointMode) {
  const std::vector<float> gradient = random_values<float>(1000, 3, 1e37);
  const auto run = [&] {
    std::vector<float> weight(1000, 1.0f), grad = gradient;
    Adam optimizer({{"w", view(weight), view(grad)}}, {.lr = 0.01});
    GradScaler scaler(NoScale{});
    for (int i = 0; i < 20; ++i) {
      scaler.scale(1.0f);
      scaler.step(optimizer, {.max_norm = 1.0f});
      scaler.update();
    }
    return bytes_of(weight);
  };
  const auto expected = run();
  const CarelessMode mode(FE_UPWARD);
  EXPECT_EQ(run(), expected);
}

TEST(Unscale, AllowsManualClipping) {
  std::vector<float> weight(2, 1.0f), grad(2);
  SGD optimizer({{"w", view(weight), view(grad)}}, {.lr = 1.0});
  GradScaler scaler;
  grad.assign(2, 3.0f * scaler.scale(1.0f));
  EXPECT_TRUE(scaler.unscale_(optimizer).ok());
  EXPECT_EQ(grad[0], 3.0f);
  for (float& g : grad) g = std::min(g, 0.5f);
  const StepReport report = scaler.step(optimizer);
  EXPECT_TRUE(report.applied);
  EXPECT_EQ(report.scale, 65536.0f);
  EXPECT_EQ(weight[0], 0.5f);
}

TEST(Unscale, NanAfterUnscaleSkipsTheStep) {
  std::vector<float> weight(2, 1.0f), grad(2);
  SGD optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  grad.assign(2, scaler.scale(1.0f));
  scaler.unscale_(optimizer);
  grad[1] = kNan;
  EXPECT_FALSE(scaler.step(optimizer).applied);
  EXPECT_EQ(weight[0], 1.0f);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768.0f);
}

TEST(Unscale, OverflowFoundByUnscaleSkipsTheStep) {
  std::vector<float> weight(2, 1.0f), grad(2);
  SGD optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  grad = {kInf, 1.0f};
  optimizer.set_grad(0, view(grad));
  EXPECT_FALSE(scaler.unscale_(optimizer).ok());
  grad[0] = 0.0f;
  const StepReport report = scaler.step(optimizer);
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.culprit, "w: 1 inf, 0 nan");
}

TEST(Unscale, CountsGradientsThatUnderflowToZero) {
  Loop loop;
  GradScaler scaler;
  loop.backward(scaler.scale(1.0f), 1e-8f);
  EXPECT_EQ(scaler.unscale_(loop.optimizer).new_zeros, 3);
}

TEST(Scale, IsComputedInFp32) {
  GradScaler scaler;
  EXPECT_EQ(scaler.scale(f16(2.0f)), 131072.0f) << "exceeds the range of FP16";
  EXPECT_EQ(scaler.scale(bf16(2.0f)), 131072.0f);
  EXPECT_TRUE(std::isnan(scaler.scale(kNan)));
}

TEST(Disabled, PassesLossesThroughAndSkipsNonFiniteGradients) {
  Loop loop;
  GradScaler scaler(DynamicScale{}, {.enabled = false});
  EXPECT_FALSE(scaler.enabled());
  EXPECT_EQ(scaler.scale(3.0f), 3.0f);
  EXPECT_EQ(scaler.get_scale(), 1.0f);
  loop.backward(1.0f, 0.5f);
  scaler.unscale_(loop.optimizer);
  EXPECT_TRUE(scaler.step(loop.optimizer).applied);
  EXPECT_TRUE(scaler.step(loop.optimizer).applied)
      << "a disabled scaler does not check the call order";
  scaler.update();
  EXPECT_EQ(static_cast<float>(loop.weight[0]), 0.0f);
  loop.backward(1.0f, kNan);
  EXPECT_FALSE(scaler.step(loop.optimizer).applied);
}

TEST(Disabled, AcceptsAnExternalScale) {
  Loop loop;
  GradScaler scaler(DynamicScale{}, {.enabled = false});
  float scale = 1024.0f, found = 0.0f;
  const internal::ExternalScale external{.scale = &scale, .found_inf = &found};
  const auto step = [&](GradScaler& target) {
    return internal::ScalerAccess::step(target, loop.optimizer, {}, external);
  };
  loop.backward(scale, 0.5f);
  EXPECT_EQ(step(scaler).scale, 1024.0f);
  const float after = static_cast<float>(loop.weight[0]);
  EXPECT_EQ(after, 0.5f) << "unscaled by the external scale";

  loop.backward(scale, kInf);
  EXPECT_FALSE(step(scaler).applied);
  found = 1.0f;
  loop.backward(scale, 0.5f);
  EXPECT_FALSE(step(scaler).applied) << "found_inf was set by the owner of the scale";
  for (const float unusable : {0.0f, -1.0f, kInf, kNan}) {
    scale = unusable;
    found = 0.0f;
    loop.backward(1.0f, 0.5f);
    const StepReport report = step(scaler);
    EXPECT_EQ(report.skip, Skip::kUnscaleOverflow);
    EXPECT_NE(report.culprit.find("cannot be divided by"), std::string::npos);
  }
  EXPECT_EQ(static_cast<float>(loop.weight[0]), after);

  GradScaler own(DynamicScale{});
  loop.backward(own.scale(1.0f), 0.5f);
  expect_error(ErrorCode::kInvalidArgument, "disabled scaler", [&] { step(own); });
}

TEST(Unscale, OverflowCausedByUnscalingNamesTheCulprit) {
  Loop loop;
  GradScaler scaler(StaticScale{0.5f});
  loop.backward(scaler.scale(1.0f), 120000.0f);
  EXPECT_EQ(scaler.unscale_(loop.optimizer).new_inf, 3);
  EXPECT_EQ(scaler.step(loop.optimizer).culprit, "w: 3 inf, 0 nan");
}

// The largest scaled gradient over all optimizers of the round, as measured before clipping.
TEST(Step, HeadroomPolicyUsesTheLargestScaledGradientOfTheRound) {
  std::vector<float> w1 = {1.0f}, g1 = {0.0f}, w2 = {1.0f}, g2 = {0.0f};
  SGD first({{"a", view(w1), view(g1)}});
  SGD second({{"b", view(w2), view(g2)}});
  GradScaler scaler(HeadroomScale{.init_scale = 4096.0f});
  ScaleState expected(scaler.policy());
  for (int step = 0; step < 100; ++step) {
    const float scale = scaler.scale(1.0f);
    g1[0] = -2.5f * scale;
    g2[0] = 0.5f * scale;
    if (step % 2 == 0) {  // clipped manually after the measurement
      scaler.unscale_(first);
      g1[0] = 1e-3f;
    }
    scaler.step(first);
    scaler.step(second);
    scaler.update();
    expected.advance({false, 2.5 * static_cast<double>(expected.scale())});
    ASSERT_EQ(scaler.state(), expected) << step;
  }
  EXPECT_EQ(scaler.get_scale(), 16384.0f);
}

TEST(Step, NormAboveTheLimitSkipsTheStepWithoutBackoff) {
  Loop loop;
  GradScaler scaler(DynamicScale{.init_scale = 1024.0f, .growth_interval = 1});
  loop.backward(scaler.scale(1.0f), 3.0f);
  const StepReport skipped = scaler.step(loop.optimizer, {.skip_above_norm = 1.0f});
  EXPECT_EQ(skipped.skip, Skip::kNormTooLarge);
  EXPECT_NE(skipped.to_string().find("is above skip_above_norm"), std::string::npos);
  EXPECT_EQ(static_cast<float>(loop.weight[0]), 1.0f);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2048.0f) << "it counts as a clean step";
  EXPECT_EQ(scaler.state().skipped(), 0);
  loop.backward(scaler.scale(1.0f), 0.25f);
  EXPECT_TRUE(scaler.step(loop.optimizer, {.skip_above_norm = 1.0f}).applied);
}

}  // namespace
}  // namespace headroom
