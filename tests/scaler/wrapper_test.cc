// The APIs that wrap GradScaler: Keras's LossScaleOptimizer and Apex's scale_loss.
#include "tests/scaler/support.h"

namespace headroom {
namespace {

TEST(LossScaleOptimizer, ScalesStepsAndUpdates) {
  Loop loop;
  LossScaleOptimizer optimizer(loop.optimizer);
  EXPECT_EQ(optimizer.loss_scale(), 32768.0f);
  loop.backward(optimizer.scale_loss(1.0f), 4.0f);
  EXPECT_FALSE(optimizer.apply().applied);
  EXPECT_EQ(optimizer.iterations(), 0);
  loop.backward(optimizer.scale_loss(1.0f), 0.5f);
  EXPECT_TRUE(optimizer.apply({.max_norm = 10.0f}).applied);
  EXPECT_EQ(optimizer.iterations(), 1);
  EXPECT_EQ(optimizer.loss_scale(), 16384.0f);
}

TEST(ScaleLoss, TrainingCanContinueAfterAThrownOverflow) {
  Loop loop;
  GradScaler scaler(DynamicScale{.on_overflow = OnOverflow::kThrow});
  const auto iteration = [&](float value) {
    return scale_loss(1.0f, scaler, loop.optimizer,
                      [&](float scaled) { loop.backward(scaled, value); });
  };
  expect_error(ErrorCode::kOverflow, "w: 3 inf", [&] { iteration(4.0f); });
  EXPECT_EQ(scaler.get_scale(), 32768.0f);
  EXPECT_TRUE(iteration(0.25f).applied);
}

TEST(ScaleLoss, StepsAndUpdatesUnlessBackwardThrows) {
  Loop loop;
  GradScaler scaler(preset("apex"));
  const StepReport report =
      scale_loss(1.0f, scaler, loop.optimizer, [&](float scaled) { loop.backward(scaled, 2.0f); });
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(scaler.get_scale(), 32768.0f);
  EXPECT_THROW(scale_loss(1.0f, scaler, loop.optimizer,
                          [](float) { throw std::runtime_error("backward failed"); }),
               std::runtime_error);
  EXPECT_EQ(scaler.state().steps(), 1) << "neither step() nor update() was called";
  EXPECT_TRUE(scale_loss(1.0f, scaler, loop.optimizer, [&](float scaled) {
                loop.backward(scaled, 0.5f);
              }).applied);
}

}  // namespace
}  // namespace headroom
