// The order of calls: unscale_(), several optimizers, micro-batches, and calls out of order.
#include <cmath>
#include <memory>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

// SGD of torch, or the fused one, with a learning rate of 1.
std::unique_ptr<torch::optim::Optimizer> make_sgd(const torch::Tensor& parameter, bool fused) {
  const std::vector<torch::Tensor> parameters = {parameter};
  const torch::optim::SGDOptions options(1.0);
  if (fused) return std::make_unique<FusedSGD>(parameters, options);
  return std::make_unique<torch::optim::SGD>(parameters, options);
}

TEST(Unscale, AllowsManualClipping) {
  for (const bool fused : {false, true}) {
    GradScaler scaler;
    torch::Tensor w = leaf({0.0f, 0.0f});
    const auto optimizer = make_sgd(w, fused);
    scaler.scale((w * torch::tensor({30.0f, 40.0f})).sum()).backward();
    EXPECT_TRUE(scaler.unscale_(*optimizer).ok());
    EXPECT_EQ(value(w.grad()[0]), 30.0);
    const double norm = torch::nn::utils::clip_grad_norm_({w}, 1.0);
    EXPECT_NEAR(norm, 50.0, 1e-5);
    EXPECT_TRUE(scaler.step(*optimizer).applied);
    EXPECT_NEAR(value(w[1]), -0.8, 1e-6);
  }
}

TEST(Unscale, OverflowFoundByUnscaleSkipsTheStep) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum() * kInfinity).backward();
  EXPECT_FALSE(scaler.unscale_(optimizer).ok());
  w.mutable_grad().zero_();  // hides the overflow after it was found
  EXPECT_FALSE(scaler.step(optimizer).applied);
  EXPECT_EQ(value(w), 1.0);
}

TEST(Unscale, NanAfterUnscaleSkipsTheStep) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum()).backward();
  scaler.unscale_(optimizer);
  w.mutable_grad().fill_(std::nan(""));
  EXPECT_FALSE(scaler.step(optimizer).applied);
  EXPECT_EQ(value(w), 1.0);
}

TEST(Unscale, UnscaledGradientsWithoutAStepAreRescaled) {
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  torch::Tensor w = leaf({0.0f}), v = leaf({0.0f}), u = leaf({0.0f});
  auto optimizer = sgd({w}), other = sgd({v}), dropped = sgd({u});
  scaler.scale((2 * w + v + u).sum()).backward();
  scaler.unscale_(optimizer);
  scaler.unscale_(dropped);
  u.mutable_grad() = torch::Tensor();
  scaler.step(other);
  scaler.update();
  scaler.scale((3 * w + u).sum()).backward();
  scaler.step(optimizer);
  scaler.step(dropped);
  EXPECT_EQ(value(w), -5.0);
  EXPECT_EQ(value(u), -1.0);
}

TEST(Unscale, GradientsBeyondFp16AfterUnscalingAreSkipped) {
  GradScaler scaler(DynamicScale{.init_scale = 0.25f, .min_scale = 0x1p-20f});
  torch::Tensor half = torch::zeros({2}, torch::kHalf).requires_grad_();
  torch::Tensor wide = leaf({0.0f});
  auto optimizer = sgd({half, wide});
  const auto gradients = [&](float a, float b) {
    scaler.scale(wide.sum());
    half.mutable_grad() = torch::full({2}, 0.25f * a, torch::kHalf);
    wide.mutable_grad() = torch::full({1}, 0.25f * b);
  };
  gradients(1e5f, 1.0f);
  const StepReport report = scaler.step(optimizer);
  EXPECT_EQ(report.skip, Skip::kUnscaleOverflow);
  EXPECT_NE(report.culprit.find("beyond FP16"), std::string::npos) << report.culprit;
  EXPECT_EQ(value(half[0]), 0.0);
  scaler.discard();
  GradScaler with_static_scale(ScalePolicy(StaticScale{.scale = 0.25f}));
  with_static_scale.scale(wide.sum());
  half.mutable_grad() = torch::full({2}, 1.0f, torch::kHalf);
  wide.mutable_grad() = torch::full({1}, 1e5f);
  EXPECT_TRUE(with_static_scale.step(optimizer).applied)
      << "FP32 gradients may exceed the range of FP16";
  with_static_scale.update();
  with_static_scale.scale(wide.sum());
  half.mutable_grad() = torch::full({2}, 25000.0f, torch::kHalf);
  EXPECT_TRUE(with_static_scale.step(optimizer, {.max_norm = 1.0f}).applied)
      << "the clipped gradient fits FP16";
}

TEST(Order, PendingGradientsAreRescaledWhenTheScaleIsSetOrLoaded) {
  const auto weight_change = [](const std::function<void(GradScaler&)>& change, bool unscale) {
    GradScaler scaler(DynamicScale{.init_scale = 1024.0f});
    torch::Tensor a = leaf({0.0f}), b = leaf({0.0f});
    auto first = sgd({a}), second = sgd({b});
    scaler.scale((a + b).sum()).backward();
    scaler.step(first);
    scaler.step(second);
    scaler.update();
    a.mutable_grad().zero_();
    b.mutable_grad().zero_();
    const double before = value(b);
    scaler.scale((a + b).sum()).backward();
    if (unscale) scaler.unscale_(second);
    scaler.step(first);
    change(scaler);
    scaler.scale(b.sum()).backward();
    scaler.step(second);
    return value(b) - before;
  };
  for (const bool unscale : {false, true}) {
    EXPECT_EQ(weight_change([](GradScaler& scaler) { scaler.update(8.0); }, unscale), -2.0);
    EXPECT_EQ(weight_change([](GradScaler& scaler) { scaler.update(); }, unscale), -2.0);
    EXPECT_EQ(weight_change(
                  [](GradScaler& scaler) {
                    GradScaler other(DynamicScale{.init_scale = 8.0f});
                    scaler.load_state_dict(other.state_dict());
                  },
                  unscale),
              -2.0);
    EXPECT_EQ(weight_change(
                  [](GradScaler& scaler) {
                    scaler.load(GradScaler(DynamicScale{.init_scale = 8.0f}).save());
                  },
                  unscale),
              -2.0);
  }
}

TEST(Order, GradientsOfABackwardAfterStepAreRescaled) {
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  torch::Tensor w = leaf({0.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum()).backward();
  const torch::Tensor late = scaler.scale(w.sum());
  scaler.step(optimizer);
  w.mutable_grad().zero_();
  late.backward();
  scaler.update();
  scaler.scale(w.sum()).backward();
  scaler.step(optimizer);
  EXPECT_EQ(value(w), -3.0);
}

TEST(Order, BackwardOfALossScaledBeforeUpdateIsRejected) {
  GradScaler scaler, constant{StaticScale{8.0f}};
  torch::Tensor w = leaf({0.0f});
  auto optimizer = sgd({w});
  for (GradScaler* const each : {&scaler, &constant}) {
    each->scale(w.sum()).backward();
    const torch::Tensor late = each->scale(w.sum());
    each->step(optimizer);
    each->update();
    w.mutable_grad() = torch::Tensor();
    if (each == &constant) {
      EXPECT_NO_THROW(late.backward()) << "a static scale never changes";
    } else {
      expect_error(ErrorCode::kWrongOrder, "before update()", [&] { late.backward(); });
      scaler.discard();
    }
  }
}

TEST(Order, CallsOutOfOrderAreRejected) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  const auto expect_wrong_order = [&](const char* part, const std::function<void()>& call) {
    expect_error(ErrorCode::kWrongOrder, part, call);
  };
  w.mutable_grad() = torch::ones({1});
  expect_wrong_order("before any scale()", [&] { scaler.unscale_(optimizer); });
  expect_wrong_order("before any scale()", [&] { scaler.step(optimizer); });
  expect_wrong_order("no optimizer was stepped", [&] { scaler.update(); });
  scaler.scale(w.sum()).backward();
  expect_wrong_order("no optimizer was stepped", [&] { scaler.update(); });
  scaler.unscale_(optimizer);
  expect_wrong_order("already unscaled", [&] { scaler.unscale_(optimizer); });
  scaler.step(optimizer);
  expect_wrong_order("after step()", [&] { scaler.unscale_(optimizer); });
  expect_wrong_order("after step()", [&] { scaler.step(optimizer); });
  scaler.update();
  expect_wrong_order("no optimizer was stepped", [&] { scaler.update(); });
}

TEST(Order, StepWithoutGradientsIsRejectedAndUnscaleIsNot) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(torch::ones({}));
  EXPECT_NO_THROW(scaler.unscale_(optimizer));
  expect_error(ErrorCode::kWrongOrder, "gradient", [&] { scaler.step(optimizer); });
}

TEST(Order, StepCanBeRetriedAfterAnException) {
  struct ThrowsOnce : torch::optim::Optimizer {
    explicit ThrowsOnce(std::vector<torch::Tensor> params)
        : Optimizer(std::move(params), std::make_unique<torch::optim::SGDOptions>(1.0)) {}
    torch::Tensor step(LossClosure) override {
      if (++calls == 1) throw std::runtime_error("first call");
      torch::NoGradGuard no_grad;
      param_groups()[0].params()[0].sub_(param_groups()[0].params()[0].grad());
      return {};
    }
    int calls = 0;
  };
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  ThrowsOnce optimizer({w});
  scaler.scale(w.sum()).backward();
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_EQ(value(w), 0.0);
}

TEST(SeveralOptimizers, EachHasItsOwnVerdictAndTheScaleBacksOffOnce) {
  GradScaler scaler;
  torch::Tensor a = leaf({1.0f}), b = leaf({1.0f});
  auto first = sgd({a}), second = sgd({b});
  scaler.scale(a.sum() * kInfinity).backward();
  scaler.scale(b.sum()).backward();
  EXPECT_FALSE(scaler.step(first).applied);
  EXPECT_TRUE(scaler.step(second).applied);
  scaler.update();
  EXPECT_EQ(value(a), 1.0);
  EXPECT_EQ(value(b), 0.0);
  EXPECT_EQ(scaler.get_scale(), 32768.0);
}

TEST(SeveralOptimizers, SharedParameterIsRejected) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto first = sgd({w});
  FusedSGD second({w}, torch::optim::SGDOptions(1.0));
  scaler.scale(w.sum()).backward();
  scaler.step(first);
  expect_error(ErrorCode::kInvalidArgument, "another optimizer", [&] { scaler.step(second); });
  EXPECT_EQ(value(w), 0.0);
}

TEST(SeveralOptimizers, FusedOptimizersOfTheSameParametersMayTakeTurns) {
  GradScaler scaler(GradScalerOptions().init_scale(4.0));
  torch::Tensor w = leaf({4.0f});
  FusedSGD first({w}, torch::optim::SGDOptions(1.0)), second({w}, torch::optim::SGDOptions(1.0));
  for (FusedSGD* const optimizer : {&first, &second, &first}) {
    optimizer->zero_grad();
    scaler.scale(w.sum()).backward();
    EXPECT_TRUE(scaler.step(*optimizer).applied);
    FusedSGD& other = optimizer == &first ? second : first;
    expect_error(ErrorCode::kInvalidArgument, "another optimizer", [&] { scaler.step(other); });
    scaler.update();
  }
  EXPECT_EQ(value(w), 1.0);
}

TEST(SeveralOptimizers, NewOptimizerCanReplaceADestroyedOne) {
  for (const bool fused : {false, true}) {
    GradScaler scaler;
    torch::Tensor w = leaf({4.0f});
    for (int i = 0; i < 4; ++i) {
      const auto optimizer = make_sgd(w, fused);
      optimizer->zero_grad();
      scaler.scale(w.sum()).backward();
      EXPECT_TRUE(scaler.step(*optimizer).applied);
      scaler.update();
    }
    EXPECT_EQ(value(w), 0.0);
  }
}

TEST(SeveralOptimizers, PendingGradientsAreRescaledAcrossUpdates) {
  GradScaler scaler(GradScalerOptions().growth_interval(1));
  torch::Tensor a = leaf({0.0f}), b = leaf({0.0f});
  auto frequent = sgd({a});
  auto rare = sgd({b});
  const auto round = [&](bool both) {
    a.mutable_grad() = torch::Tensor();
    scaler.scale(a.sum() + b.sum()).backward();
    scaler.step(frequent);
    const double norm = both ? scaler.step(rare).grad_norm : 0.0;
    scaler.update();
    if (both) b.mutable_grad() = torch::Tensor();
    return norm;
  };
  EXPECT_EQ(round(true), 1.0);
  round(false);
  round(false);
  EXPECT_EQ(round(true), 3.0);
}

TEST(SeveralOptimizers, GradientsAddedAfterAStepAreRescaled) {
  for (const bool fused : {false, true}) {
    GradScaler scaler(GradScalerOptions().init_scale(4.0).growth_interval(1));
    torch::Tensor a = leaf({0.0f}), b = leaf({0.0f});
    auto first = sgd({a});
    const auto second = make_sgd(b, fused);
    scaler.scale(b.sum()).backward();
    scaler.step(*second);
    second->zero_grad();
    scaler.scale(a.sum() + b.sum()).backward();
    scaler.step(first);
    scaler.update();  // the scale doubles while b's gradient is pending
    scaler.scale(a.sum() + b.sum()).backward();
    EXPECT_EQ(scaler.step(*second).grad_norm, 2.0);
    EXPECT_EQ(value(b), -3.0);
  }
}

TEST(Accumulation, MicroBatchGradientsAddUp) {
  GradScaler scaler;
  torch::Tensor w = leaf({0.0f});
  auto optimizer = sgd({w});
  for (int i = 0; i < 4; ++i) scaler.scale(w.sum() / 4).backward();
  EXPECT_TRUE(scaler.step(optimizer).applied);
  scaler.update();
  EXPECT_EQ(value(w), -1.0);
}

TEST(GradientPenalty, WorksThroughDoubleBackward) {
  // loss = w^2 + |d(w^2)/dw|^2 = 5 w^2, so the gradient is 10 w.
  GradScaler scaler;
  torch::Tensor w = leaf({3.0f});
  auto optimizer = sgd({w}, 0.1);
  const torch::Tensor loss = (w * w).sum();
  const auto grads = torch::autograd::grad({scaler.scale(loss)}, {w}, {}, true, true);
  const torch::Tensor penalty = (grads[0] / scaler.get_scale()).pow(2).sum();
  scaler.scale(loss + penalty).backward();
  EXPECT_NEAR(scaler.step(optimizer).grad_norm, 30.0, 1e-4);
  scaler.update();
  EXPECT_NEAR(value(w), 0.0, 1e-5);
}

}  // namespace
}  // namespace headroom::libtorch
