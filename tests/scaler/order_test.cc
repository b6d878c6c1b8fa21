// The order of calls, as in torch.amp.GradScaler, for one optimizer and for several. Gradients that
// are pending when the scale changes are rescaled.
#include "scaler/scaler.h"
#include "tests/scaler/support.h"

namespace headroom {
namespace {

TEST(Order, CallsBeforeTheFirstScaleAreRejected) {
  OneWeight loop;
  GradScaler scaler;
  expect_wrong_order("unscale_() was called before any scale()",
                     [&] { scaler.unscale_(loop.optimizer); });
  expect_wrong_order("step() was called before any scale()", [&] { scaler.step(loop.optimizer); });
  expect_wrong_order("no optimizer was stepped", [&] { scaler.update(); });
  EXPECT_EQ(loop.weight[0], 1.0f);
}

TEST(Order, RefusedOptimizerDoesNotKeepItsParameters) {
  OneWeight loop;
  SGD other({{"w", view(loop.weight), view(loop.grad)}});
  SGD without_gradient({{"w", view(loop.weight), {}}});
  GradScaler scaler, retries(HeadroomScale{.retry = true});
  GradAccumulator sums({{"w", view(loop.weight), view(loop.grad)}});
  for (GradScaler* each : {&scaler, &retries}) {
    expect_wrong_order("before any scale()", [&] { each->step(loop.optimizer); });
    expect_wrong_order("before any scale()", [&] { each->unscale_(loop.optimizer); });
    expect_wrong_order("has a gradient", [&] { each->step(without_gradient); });
    each->scale(1.0f);
  }
  expect_error(ErrorCode::kUnsupported, "retries batches", [&] { retries.step(sums); });
  EXPECT_TRUE(scaler.step(other).applied);
  EXPECT_TRUE(retries.step(other).applied);
}

TEST(Order, MovedFromScalerRejectsEveryCall) {
  OneWeight loop;
  GradScaler moved_from;
  GradScaler moved_to = std::move(moved_from);
  const std::function<void()> calls[] = {
      // NOLINTBEGIN(bugprone-use-after-move)
      [&] { moved_from.scale(1.0f); }, [&] { moved_from.step(loop.optimizer); },
      [&] { moved_from.update(); },    [&] { moved_from.unscale_(loop.optimizer); },
      [&] { moved_from.save(); },      [&] { moved_from.load(moved_to.save()); },
      [&] { moved_from.get_scale(); }, [&] { moved_from.policy(); },
      [&] { moved_from.report(); },    [&] { moved_from.discard(); },
      [&] { moved_from.retry(); }};  // NOLINTEND(bugprone-use-after-move)
  for (const auto& call : calls) {
    expect_error(ErrorCode::kInvalidArgument, "was moved from", call);
  }
}

TEST(Order, AssumedLossesLeaveTheGradientsOfSteppedOptimizersAlone) {
  OneWeight first, second;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  internal::ScalerAccess::assume_losses(scaler);
  for (int i = 0; i < 2; ++i) {
    first.grad[0] = second.grad[0] = scaler.get_scale();
    const float stored = first.grad[0];
    EXPECT_EQ(scaler.step(first.optimizer).grad_norm, 1.0);
    EXPECT_EQ(scaler.step(second.optimizer).grad_norm, 1.0);
    scaler.update();
    EXPECT_EQ(first.grad[0], stored) << "not rescaled: they were used";
  }
}

TEST(Order, RefusedStepOfAnAssumedLossLeavesTheScaleSettable) {
  OneWeight loop;
  GradScaler scaler;
  internal::ScalerAccess::assume_losses(scaler);
  EXPECT_THROW(scaler.step(loop.optimizer, {.max_norm = -1.0f}), Error);
  scaler.set_scale(1024.0f);
  scaler.load(scaler.save());
}

TEST(Order, UnscaleIsAllowedOnceAndNotAfterStep) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.unscale_(loop.optimizer);
  expect_wrong_order("already unscaled", [&] { scaler.unscale_(loop.optimizer); });
  scaler.step(loop.optimizer);
  expect_wrong_order("after step()", [&] { scaler.unscale_(loop.optimizer); });
}

TEST(Order, StepIsAllowedOnceBetweenUpdates) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  expect_wrong_order("after step()", [&] { scaler.step(loop.optimizer); });
  scaler.update();
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
}

TEST(Order, UpdateRequiresAStepOrUnscale) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  expect_wrong_order("no optimizer was stepped", [&] { scaler.update(); });
  scaler.unscale_(loop.optimizer);
  scaler.update();  // a user may inspect the gradients and decide not to step
  expect_wrong_order("no optimizer was stepped", [&] { scaler.update(); });
}

TEST(Order, AccumulatedGradientsAreRescaledAcrossUpdates) {
  OneWeight frequent, rare;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  const auto round = [&](bool both) {
    const float scaled = scaler.scale(1.0f);
    frequent.grad[0] = 0.25f * scaled;
    rare.grad[0] += 0.5f * scaled;
    EXPECT_EQ(scaler.step(frequent.optimizer).grad_norm, 0.25);
    double norm = 0.0;
    if (both) {
      norm = scaler.step(rare.optimizer, {.clear_grads = ClearGrads::kAlways}).grad_norm;
    }
    scaler.update();
    return norm;
  };
  rare.grad[0] = 0.0f;
  EXPECT_EQ(round(true), 0.5);
  round(false);  // the scale doubles twice while gradients of `rare` are pending
  round(false);
  EXPECT_EQ(round(true), 1.5);
}

TEST(Order, GradientsAddedBetweenStepAndUpdateAreRescaled) {
  OneWeight loop;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  loop.grad[0] = scaler.scale(1.0f);
  scaler.step(loop.optimizer, {.clear_grads = ClearGrads::kAlways});
  loop.grad[0] += 0.5f * scaler.scale(1.0f);  // the first micro-batch of the next step
  scaler.update();
  loop.grad[0] += 0.25f * scaler.scale(1.0f);
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.75);
}

TEST(Order, UnscaledGradientsWithoutAStepAreRescaled) {
  OneWeight loop, other;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  loop.grad[0] = 0.5f * scaler.scale(1.0f);
  scaler.unscale_(loop.optimizer);
  for (int round = 0; round < 2; ++round) {
    other.grad[0] = 0.5f * scaler.scale(1.0f);  // a loss of the other optimizer only
    scaler.step(other.optimizer);
    scaler.update();
    EXPECT_EQ(loop.grad[0], 0.5f * scaler.get_scale());
  }
  loop.grad[0] += 0.25f * scaler.scale(1.0f);  // a loss of both
  EXPECT_EQ(scaler.unscale_(loop.optimizer).norm() / scaler.get_scale(), 0.75);
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.75);
}

TEST(Order, PendingGradientsKeepTheScaleOfTheirBackward) {
  OneWeight frequent, rare;
  GradScaler scaler;
  scaler.scale(1.0f);
  frequent.grad[0] = kInf;
  scaler.step(frequent.optimizer);
  scaler.step(rare.optimizer);
  scaler.update();  // to 2^15
  frequent.grad[0] = rare.grad[0] = 0.5f * scaler.scale(1.0f);
  scaler.step(frequent.optimizer);
  scaler.update();  // unchanged
  EXPECT_EQ(scaler.step(rare.optimizer).grad_norm, 0.5);
}

TEST(Order, DiscardClearsTheUnscaledState) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  loop.grad[0] = kInf;
  EXPECT_FALSE(scaler.unscale_(loop.optimizer).ok());
  scaler.discard();
  loop.grad[0] = 0.5f * scaler.scale(1.0f);
  const StepReport report = scaler.step(loop.optimizer);
  EXPECT_TRUE(report.applied);
  EXPECT_EQ(report.grad_norm, 0.5);
}

TEST(Order, OptimizersCanAlternate) {
  OneWeight generator, discriminator;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  for (int i = 0; i < 6; ++i) {
    for (OneWeight* loop : {&discriminator, &generator}) {
      loop->grad[0] = 0.5f * scaler.scale(1.0f);  // backward overwrites the gradient
      EXPECT_EQ(scaler.step(loop->optimizer).grad_norm, 0.5);
      scaler.update();
    }
  }
}

TEST(Order, SaveBetweenStepAndUpdateIsRejected) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  expect_wrong_order("save()", [&] { scaler.save(); });
  scaler.update();
  EXPECT_NO_THROW(scaler.save());
}

TEST(Order, LoadWithPendingGradientsRequiresDiscard) {
  OneWeight loop;
  GradScaler scaler;
  const std::string saved = scaler.save();
  scaler.scale(1.0f);
  expect_wrong_order("discard()", [&] { scaler.load(saved); });
  expect_wrong_order("discard()", [&] { scaler.load_state(scaler.state()); });
  scaler.discard();
  EXPECT_NO_THROW(scaler.load(saved));
}

TEST(Order, UpdateAfterUnscalingNoGradientsIsRejected) {
  std::vector<float> weight = {1.0f};
  AdamW optimizer({{"w", view(weight), TensorView{}}});
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  scaler.scale(1.0f);
  EXPECT_NO_THROW(scaler.unscale_(optimizer));
  expect_wrong_order("no optimizer was stepped", [&] { scaler.update(); });
}

TEST(Order, StepWithoutGradientsIsRejected) {
  std::vector<float> weight = {1.0f};
  AdamW optimizer({{"w", view(weight), TensorView{}}});
  AdamW without_parameters({});
  GradScaler scaler;
  scaler.scale(1.0f);
  expect_wrong_order("none of whose parameters", [&] { scaler.step(optimizer); });
  expect_wrong_order("none of whose parameters", [&] { scaler.step(without_parameters); });
  EXPECT_EQ(scaler.state().steps(), 0);
}

TEST(Order, StepAfterUnscaledGradientsWereClearedHasTheVerdictOfUnscaling) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  AdamW optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler(DynamicScale{.init_scale = 4.0f});
  for (const float value : {1.0f, std::numeric_limits<float>::infinity()}) {
    grad[0] = value;
    optimizer.set_grad(0, view(grad));
    scaler.scale(1.0f);
    scaler.unscale_(optimizer);
    optimizer.set_grad(0, TensorView{});
    EXPECT_EQ(scaler.step(optimizer).applied, value == 1.0f);
    scaler.update();
    EXPECT_EQ(weight[0], 1.0f);
  }
  EXPECT_EQ(scaler.get_scale(), 2.0f);
  EXPECT_EQ(scaler.report().culprit, "w: 1 inf, 0 nan");
}

TEST(Order, MovedOptimizerKeepsItsIdentity) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  AdamW first({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(first);
  AdamW second = std::move(first);
  expect_wrong_order("after step()", [&] { scaler.step(second); });
  scaler.update();
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(second).applied);
  const auto moved_from = [](const std::function<void()>& call) {
    expect_error(ErrorCode::kInvalidArgument, "was moved from", call);
  };
  moved_from([&] { scaler.step(first); });    // NOLINT
  moved_from([&] { scaler.report(first); });  // NOLINT
}

TEST(Order, NewOptimizerRequiresALossInTheRound) {
  OneWeight first, second;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  const float scaled = scaler.scale(1.0f);
  first.grad[0] = second.grad[0] = 0.5f * scaled;
  scaler.step(first.optimizer);
  scaler.update();  // doubles the scale; `second` was not used, so its gradient keeps the old one
  expect_wrong_order("before any scale() in this round", [&] { scaler.step(second.optimizer); });
  EXPECT_EQ(second.weight[0], 1.0f);
}

TEST(SeveralOptimizers, EachHasItsOwnVerdictAndTheScaleIsShared) {
  OneWeight good, bad;
  GradScaler scaler;
  scaler.scale(1.0f);
  bad.grad[0] = kInf;
  EXPECT_FALSE(scaler.step(bad.optimizer).applied);
  EXPECT_TRUE(scaler.step(good.optimizer).applied) << "each optimizer has its own verdict";
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768.0f);
  EXPECT_EQ(scaler.state().skipped(), 1);
}

TEST(SeveralOptimizers, SharedParameterIsRejected) {
  OneWeight loop;
  std::vector<float> other_grad = {1.0f};
  AdamW other({{"same", view(loop.weight), view(other_grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  const float before = loop.weight[0];
  expect_error(ErrorCode::kInvalidArgument, "another optimizer", [&] { scaler.step(other); });
  EXPECT_EQ(loop.weight[0], before);
}

TEST(SeveralOptimizers, RejectedOptimizerLeavesNoState) {
  OneWeight loop;
  std::vector<float> other_grad = {1.0f}, next_grad = {0.0f};
  AdamW other({{"same", view(loop.weight), view(other_grad)}});
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  expect_error(ErrorCode::kInvalidArgument, "another optimizer", [&] { scaler.step(other); });
  loop.grad[0] = 0.5f * scaler.scale(1.0f);
  scaler.update();  // rescales the pending gradient once
  EXPECT_EQ(other_grad[0], 1.0f);
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.5);
  scaler.update();
  loop.optimizer.set_grad(0, view(next_grad));
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(loop.optimizer).applied);
}

TEST(SeveralOptimizers, SharedParameterAddedLaterIsRejected) {
  OneWeight first, second;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(first.optimizer);
  scaler.step(second.optimizer);
  scaler.update();
  std::vector<float> grad = {1.0f};
  second.optimizer.add_group({{"again", view(first.weight), view(grad)}}, {});
  scaler.scale(1.0f);
  expect_error(ErrorCode::kInvalidArgument, "another optimizer",
               [&] { scaler.step(second.optimizer); });
}

TEST(SeveralOptimizers, GradientBufferCanMoveBetweenOptimizers) {
  OneWeight first, second;
  std::vector<float> other = {1.0f};
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(first.optimizer);
  scaler.step(second.optimizer);
  scaler.update();
  first.optimizer.set_grad(0, view(other));
  second.optimizer.set_grad(0, view(first.grad));
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(second.optimizer).applied);
  EXPECT_TRUE(scaler.step(first.optimizer).applied);
}

TEST(SeveralOptimizers, NewOptimizerCanReplaceADestroyedOne) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  GradScaler scaler;
  for (int i = 0; i < 3; ++i) {
    SGD optimizer({{"w", view(weight), view(grad)}});
    scaler.scale(1.0f);
    EXPECT_TRUE(scaler.step(optimizer).applied);
    scaler.update();
  }
}

}  // namespace
}  // namespace headroom
