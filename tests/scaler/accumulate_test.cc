// GradAccumulator: losses with separate scalers, and micro-batches across a change of the scale.
#include "tests/support.h"

namespace headroom {
namespace {

// Two FP16 weights of 1 whose gradients are summed in FP32.
struct AccumulationLoop {
  std::vector<f16> weight = std::vector<f16>(2, f16(1.0f)), grad = std::vector<f16>(2);
  GradAccumulator sums{{{"w", view(weight), view(grad)}}};
  SGD optimizer{sums.summed(), {.lr = 1.0}};

  StepReport add(GradScaler& scaler, float value) {
    const float scaled = scaler.scale(1.0f);
    for (f16& g : grad) g = f16(value * scaled);
    const StepReport report = scaler.step(sums, {.clear_grads = ClearGrads::kAlways});
    scaler.update();
    return report;
  }
  float master() const { return optimizer.master(0)[0]; }
};

TEST(Accumulator, SumIsCorrectAcrossScaleChanges) {
  AccumulationLoop loop;
  GradScaler scaler(DynamicScale{.init_scale = 256.0f, .growth_interval = 1});
  for (const float value : {0.125f, 0.25f, 0.0625f}) EXPECT_TRUE(loop.add(scaler, value).applied);
  EXPECT_EQ(scaler.get_scale(), 2048.0f) << "the scale grew after every micro-batch";
  EXPECT_TRUE(loop.sums.step(loop.optimizer).applied);
  EXPECT_EQ(loop.master(), 1.0f - 0.4375f);
  EXPECT_EQ(loop.grad[0].bits, 0);
}

TEST(Accumulator, ParametersMayHaveMastersOfTheirOwn) {
  std::vector<f16> weight(2, f16(1.0f)), grad(2);
  std::vector<float> master(2, 1.0f);
  GradAccumulator sums({{"w", view(weight), view(grad), view(master)}});
  SGD optimizer(sums.summed(), {.lr = 1.0});
  GradScaler scaler(StaticScale{4.0f});
  for (f16& g : grad) g = f16(scaler.scale(0.25f));
  scaler.step(sums);
  EXPECT_TRUE(sums.step(optimizer).applied);
  EXPECT_EQ(master[1], 0.75f);
}

TEST(Accumulator, OverflowLowersOnlyTheScaleOfItsOwnLoss) {
  AccumulationLoop loop;
  GradScaler small(StaticScale{16.0f}), large;
  EXPECT_TRUE(loop.add(small, 0.25f).applied);
  EXPECT_FALSE(loop.add(large, 4.0f).applied);
  const StepReport report = loop.sums.step(loop.optimizer);
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.culprit, "w: 2 inf, 0 nan");
  EXPECT_EQ(loop.master(), 1.0f);
  EXPECT_EQ(large.get_scale(), 32768.0f);
  EXPECT_EQ(small.get_scale(), 16.0f);

  EXPECT_TRUE(loop.add(small, 0.25f).applied);
  EXPECT_TRUE(loop.add(large, 0.125f).applied);
  EXPECT_TRUE(loop.sums.step(loop.optimizer).applied) << "the bad sum was discarded";
  EXPECT_EQ(loop.master(), 1.0f - 0.375f);
}

TEST(Accumulator, KeepsGradientsThatAnFp16SumWouldLose) {
  AccumulationLoop loop;
  GradScaler scaler;
  loop.add(scaler, 0.5f);
  for (int i = 0; i < 1000; ++i) loop.add(scaler, 1e-4f);
  loop.sums.step(loop.optimizer);
  EXPECT_NEAR(loop.master(), 1.0 - 0.6, 1e-4);
}

TEST(Accumulator, AcceptsReallocatedGradients) {
  AccumulationLoop loop;
  GradScaler scaler(StaticScale{4.0f});
  std::vector<f16> next(2), other(3);
  loop.sums.rebind({{"w", view(loop.weight), view(next)}});
  scaler.scale(1.0f);
  for (f16& g : next) g = f16(2.0f);
  scaler.step(loop.sums);
  EXPECT_EQ(static_cast<float>(loop.weight[0]), 1.0f)
      << "stepping the accumulator writes only the sums";
  loop.sums.step(loop.optimizer);
  EXPECT_EQ(loop.master(), 0.5f);
  expect_error(ErrorCode::kMismatch, "gradient of 3", [&] {
    loop.sums.rebind({{"w", view(loop.weight), view(other)}});
  });
}

TEST(Accumulator, GradientAddedAfterConstructionIsRejected) {
  std::vector<f16> weight(2), grad(2);
  GradAccumulator sums({{"w", view(weight), TensorView{}}});
  expect_error(ErrorCode::kMismatch, "'w' had no gradient", [&] { sums.set_grad(0, view(grad)); });
  expect_error(ErrorCode::kMismatch, "'w' had no gradient", [&] {
    sums.rebind({{"w", view(weight), view(grad)}});
  });
}

TEST(Accumulator, ClipsTheSum) {
  AccumulationLoop loop;
  GradScaler scaler(StaticScale{16.0f});
  loop.add(scaler, 3.0f);
  loop.add(scaler, 1.0f);
  const StepReport report = loop.sums.step(loop.optimizer, {.max_norm = 1.0f});
  EXPECT_NEAR(report.grad_norm, 4.0 * std::sqrt(2.0), 1e-6);
  EXPECT_NEAR(loop.master(), 1.0 - 1.0 / std::sqrt(2.0), 1e-6);
}

TEST(Accumulator, OneBadGradientSkipsEveryOptimizer) {
  std::vector<float> wa = {1.0f}, wb = {1.0f}, ga(1), gb(1);
  GradAccumulator sums({{"a", view(wa), view(ga)}, {"b", view(wb), view(gb)}});
  SGD first({sums.summed()[0]}, {.lr = 1.0}), second({sums.summed()[1]}, {.lr = 1.0});
  GradScaler scaler;
  const auto add = [&](float a, float b) {
    const float scaled = scaler.scale(1.0f);
    ga[0] = a * scaled;
    gb[0] = b * scaled;
    scaler.step(sums);
    scaler.update();
  };
  add(kNan, 0.5f);
  add(0.25f, 0.25f);
  expect_error(ErrorCode::kInvalidArgument, "max_norm",
               [&] { sums.step(first, {.max_norm = -1.0f}); });
  const StepReport report = sums.step(first);
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.steps, 1);
  EXPECT_EQ(report.skipped, 1);
  EXPECT_EQ(report.culprit, "a: 0 inf, 1 nan");
  expect_error(ErrorCode::kWrongOrder, "after step()", [&] { sums.step(first); });
  EXPECT_FALSE(sums.step(second).applied);
  add(0.25f, 0.25f);
  EXPECT_TRUE(sums.step(first).applied);
  EXPECT_TRUE(sums.step(second).applied);
  EXPECT_EQ(wa[0], 0.75f);
  EXPECT_EQ(wb[0], 0.75f);
}

TEST(Accumulator, BadRoundIsDroppedForOptimizersThatDidNotStep) {
  std::vector<float> wa = {1.0f}, wb = {1.0f}, ga(1), gb(1);
  GradAccumulator sums({{"a", view(wa), view(ga)}, {"b", view(wb), view(gb)}});
  SGD first({sums.summed()[0]}, {.lr = 1.0}), second({sums.summed()[1]}, {.lr = 1.0});
  GradScaler scaler(NoScale{});
  const auto add = [&](float a, float b) {
    scaler.scale(1.0f);
    ga[0] = a;
    gb[0] = b;
    scaler.step(sums);
    scaler.update();
  };
  add(1.0f, 1.0f);
  add(kNan, 1.0f);
  EXPECT_FALSE(sums.step(first).applied);
  add(0.5f, 0.5f);
  EXPECT_TRUE(sums.step(second).applied);
  EXPECT_EQ(wb[0], 0.5f);
}

TEST(Accumulator, AllowsOneStepPerRound) {
  AccumulationLoop loop;
  expect_error(ErrorCode::kWrongOrder, "before any gradient",
               [&] { loop.sums.step(loop.optimizer); });
  GradScaler scaler;
  loop.add(scaler, 0.25f);
  EXPECT_TRUE(loop.sums.step(loop.optimizer).applied);
  expect_error(ErrorCode::kWrongOrder, "after step()", [&] { loop.sums.step(loop.optimizer); });
  EXPECT_EQ(loop.optimizer.steps(0), 1);
}

TEST(Accumulator, AcceptsParametersWithoutGradients) {
  std::vector<float> wa = {1.0f}, wb = {1.0f}, ga(1);
  GradAccumulator sums({{"a", view(wa), view(ga)}, {"b", view(wb), TensorView{}}});
  SGD optimizer(sums.summed(), {.lr = 1.0});
  GradScaler scaler;
  ga[0] = 0.25f * scaler.scale(1.0f);
  scaler.step(sums);
  EXPECT_TRUE(sums.step(optimizer).applied);
  EXPECT_EQ(wa[0], 0.75f);
  EXPECT_EQ(wb[0], 1.0f);
}

TEST(Accumulator, RejectsWeightsThatShareMemoryWithGradients) {
  std::vector<float> w = {1.0f};
  expect_error(ErrorCode::kInvalidArgument, "share memory", [&] {
    GradAccumulator sums({{"w", view(w), view(w)}});
  });
}

TEST(Accumulator, RejectsAnOptimizerOnOtherGradients) {
  AccumulationLoop loop;
  SGD other({{"w", view(loop.weight), view(loop.grad)}});
  expect_error(ErrorCode::kInvalidArgument, "summed()", [&] { loop.sums.step(other); });
}

TEST(Accumulator, MovedFromOneIsRefused) {
  AccumulationLoop loop;
  const GradAccumulator moved = std::move(loop.sums);
  const auto refused = [](const auto& call) {
    expect_error(ErrorCode::kInvalidArgument, "moved from", call);
  };
  refused([&] { loop.sums.set_grad(0, view(loop.grad)); });
  refused([&] { loop.sums.summed(); });
  refused([&] { loop.sums.apply(1.0f, false); });
  refused([&] { loop.sums.skipped("w"); });
}

TEST(Accumulator, WorksWithScaleLoss) {
  AccumulationLoop loop;
  GradScaler a(StaticScale{8.0f}), b(StaticScale{1024.0f});
  const auto backward = [&](float value) {
    return [&loop, value](float scaled) {
      for (f16& g : loop.grad) g = f16(value * scaled);
    };
  };
  scale_loss(1.0f, a, loop.sums, backward(0.5f));
  scale_loss(1.0f, b, loop.sums, backward(0.25f));
  EXPECT_TRUE(loop.sums.step(loop.optimizer).applied);
  EXPECT_EQ(loop.master(), 0.25f);
}

}  // namespace
}  // namespace headroom
