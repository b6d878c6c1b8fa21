// libtorch::GradScaler follows the documented behaviour of torch.amp.GradScaler.
#include <cmath>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

TEST(Scale, MultipliesTheLossAndItsGradient) {
  GradScaler scaler;
  torch::Tensor x = leaf({2.0f});
  const torch::Tensor scaled = scaler.scale((x * x).sum());
  EXPECT_EQ(value(scaled), 4.0 * 65536.0);
  scaled.backward();
  EXPECT_EQ(value(x.grad()), 4.0 * 65536.0);
}

TEST(Scale, IsComputedInFp32For16BitLosses) {
  GradScaler scaler;
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const torch::Tensor scaled = scaler.scale(torch::tensor({4.0f, 8.0f}).to(dtype));
    EXPECT_EQ(scaled.scalar_type(), torch::kFloat);
    EXPECT_EQ(value(scaled[1]), 8.0 * 65536.0);
  }
  EXPECT_EQ(scaler.scale(torch::ones({}, torch::kDouble)).scalar_type(), torch::kDouble);
}

TEST(Scale, AcceptsListsAndRejectsNonFloatingTensors) {
  GradScaler scaler;
  const auto scaled = scaler.scale({torch::ones({}), torch::full({2}, 3.0)});
  ASSERT_EQ(scaled.size(), 2u);
  EXPECT_EQ(value(scaled[1][0]), 3.0 * 65536.0);
  expect_error(ErrorCode::kInvalidArgument, "floating", [&] { scaler.scale(torch::Tensor()); });
  expect_error(ErrorCode::kInvalidArgument, "floating",
               [&] { scaler.scale(torch::ones({}, torch::kLong)); });
}

TEST(Step, UnscalesAndRunsTheOptimizer) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f, 2.0f});
  auto optimizer = sgd({w}, 0.5);
  scaler.scale((w * torch::tensor({2.0f, 4.0f})).sum()).backward();
  const StepReport report = scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(report.applied);
  EXPECT_NEAR(report.grad_norm, std::sqrt(20.0), 1e-12);
  EXPECT_EQ(report.scale, 65536.0f);
  EXPECT_EQ(value(w[0]), 0.0);
  EXPECT_EQ(value(w[1]), 0.0);
}

TEST(Step, RetryPolicyRequestsRetriesUntilTheBatchFits) {
  GradScaler scaler(preset("headroom-retry"));
  torch::Tensor w = leaf({0.0f}, torch::kHalf);
  FusedSGD optimizer({w}, torch::optim::SGDOptions(1.0));
  std::vector<int> passes;
  for (const double gradient : {0.25, 100.0, std::nan(""), 0.125}) {
    passes.push_back(0);
    do {
      optimizer.zero_grad();
      scaler.scale((w.to(torch::kFloat) * gradient).sum()).backward();
      scaler.step(optimizer);
      scaler.update();
      ++passes.back();
    } while (scaler.retry());
  }
  EXPECT_EQ(passes[0], 1);
  EXPECT_GT(passes[1], 1);
  EXPECT_LE(passes[2], 8) << "no scale helps against NaN";
  EXPECT_EQ(passes[3], 1);
  EXPECT_EQ(value(w[0]), -100.375);
}

TEST(Step, NonFiniteGradientsSkipTheStepAndNameTheParameter) {
  for (const double bad : {kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    GradScaler scaler;
    torch::nn::Linear layer(2, 2);
    scaler.name_parameters(*layer);
    torch::optim::Adam optimizer(layer->parameters(), 0.1);
    const torch::Tensor before = layer->weight.detach().clone();
    scaler.scale(layer->forward(torch::ones({1, 2})).sum()).backward();
    layer->weight.mutable_grad()[1][0] = bad;
    const StepReport report = scaler.step(optimizer);
    scaler.update();
    EXPECT_FALSE(report.applied);
    EXPECT_EQ(report.culprit, bad == kInfinity ? "weight: 1 inf, 0 nan" : "weight: 0 inf, 1 nan");
    EXPECT_TRUE(same_bits(layer->weight, before));
    EXPECT_TRUE(optimizer.state().empty()) << "a skipped first step creates no optimizer state";
    EXPECT_EQ(scaler.get_scale(), 32768.0);
    EXPECT_EQ(layer->weight.grad().abs().sum().item<float>(), 0.0f)
        << "gradients are overwritten by zeros";
  }
}

TEST(Step, UnnamedParametersAreReportedByPosition) {
  GradScaler scaler;
  torch::Tensor a = leaf({1.0f}), b = leaf({1.0f, 2.0f});
  auto optimizer = sgd({a, b});
  scaler.scale((a.sum() + b.sum())).backward();
  b.mutable_grad()[0] = kInfinity;
  EXPECT_EQ(scaler.step(optimizer).culprit, "param_groups[0].params[1] of size [2]: 1 inf, 0 nan");
}

TEST(Step, GrowthAndBackoffMatchTorch) {
  GradScaler scaler(GradScalerOptions().init_scale(4).growth_interval(3));
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w}, 0.0);
  std::vector<double> scales;
  for (const int overflow : {0, 0, 1, 0, 0, 0, 0, 1, 1}) {
    optimizer.zero_grad();
    scaler.scale(w.sum() * (overflow ? kInfinity : 1.0)).backward();
    EXPECT_EQ(scaler.step(optimizer).applied, overflow == 0);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{4, 4, 2, 2, 2, 4, 4, 2, 1}));
}

TEST(Step, AcceptsEveryFloatingPointType) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    GradScaler scaler(GradScalerOptions().init_scale(8));
    torch::Tensor w = leaf({1.0f, 2.0f}, dtype);
    auto optimizer = sgd({w});
    scaler.scale(w.to(torch::kFloat).sum()).backward();
    ASSERT_EQ(w.grad().scalar_type(), dtype);
    EXPECT_TRUE(scaler.step(optimizer).applied);
    scaler.update();
    EXPECT_EQ(value(w[0]), 0.0);
    EXPECT_EQ(value(w[1]), 1.0);
  }
}

TEST(Step, AcceptsComplexGradients) {
  GradScaler scaler(GradScalerOptions().init_scale(8));
  torch::Tensor w = torch::ones({2}, torch::kComplexFloat).requires_grad_(true);
  auto optimizer = sgd({w});
  scaler.scale(torch::real(w * torch::conj(w)).sum()).backward();
  EXPECT_NEAR(scaler.step(optimizer).grad_norm, std::sqrt(8.0), 1e-6);
  scaler.update();
  w.mutable_grad() = torch::full({2}, c10::complex<float>(1.0f, INFINITY), torch::kComplexFloat);
  scaler.scale(torch::ones({}));
  EXPECT_FALSE(scaler.step(optimizer).applied);
}

TEST(Step, RejectsIntegerGradients) {
  GradScaler scaler;
  torch::Tensor w = torch::ones({2}, torch::kInt);
  w.mutable_grad() = torch::ones({2}, torch::kInt);
  auto optimizer = sgd({w});
  scaler.scale(torch::ones({}));
  expect_error(ErrorCode::kUnsupported, "type Int", [&] { scaler.step(optimizer); });
}

TEST(Step, RejectsResizedOrFreedGradients) {
  const auto expect_rejected = [](ErrorCode code, const std::string& part, const auto& damage) {
    torch::Tensor w = leaf({1, 1, 1, 1});
    auto plain = sgd({w});
    FusedSGD fused({w}, torch::optim::SGDOptions(1.0));
    for (torch::optim::Optimizer* optimizer : {static_cast<torch::optim::Optimizer*>(&plain),
                                               static_cast<torch::optim::Optimizer*>(&fused)}) {
      GradScaler scaler;
      scaler.scale(w.sum()).backward();
      damage(w.mutable_grad());
      expect_error(code, part, [&] { scaler.step(*optimizer); });
      w.mutable_grad().reset();
      EXPECT_TRUE(same_bits(w, torch::ones({4})));
    }
  };
  expect_rejected(ErrorCode::kMismatch, "has size [4] and a gradient of size [1]",
                  [](torch::Tensor& grad) {
                    grad.resize_({1});
                  });  // broadcasting would use one value for all four
  expect_rejected(ErrorCode::kInvalidArgument, "needs 16 bytes and its storage has 0",
                  [](torch::Tensor& grad) { grad.storage().set_nbytes(0); });
  expect_rejected(ErrorCode::kInvalidArgument, "needs 16 bytes and its storage has 8",
                  [](torch::Tensor& grad) { grad.storage().set_nbytes(8); });
}

TEST(Step, AcceptsNonContiguousGradients) {
  GradScaler scaler(GradScalerOptions().init_scale(2));
  torch::Tensor w = torch::zeros({3, 2}).requires_grad_(true);
  auto optimizer = sgd({w});
  const torch::Tensor whole = torch::full({3, 4}, 2.0);
  w.mutable_grad() = whole.slice(1, 0, 4, 2);
  scaler.scale(torch::ones({}));
  EXPECT_TRUE(scaler.step(optimizer).applied);
  scaler.update();
  EXPECT_TRUE(torch::equal(w, torch::full({3, 2}, -1.0)));
  EXPECT_TRUE(torch::equal(whole[0], torch::tensor({1.0f, 2.0f, 1.0f, 2.0f})))
      << "unscaled in place; the elements between the strides are unchanged";

  w.mutable_grad() = torch::full({1}, 2.0).expand({3, 2});
  scaler.scale(torch::ones({}));
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_TRUE(torch::equal(w, torch::full({3, 2}, -2.0)))
      << "an expanded gradient is unscaled once";
}

TEST(Step, AcceptsSparseGradientsAndSumsDuplicates) {
  for (const auto dtype : {torch::kFloat, torch::kHalf}) {
    GradScaler scaler(GradScalerOptions().init_scale(2));
    torch::Tensor w = torch::zeros({4, 2}, dtype).requires_grad_(true);
    auto optimizer = sgd({w});
    const auto sparse = [&](double first, double second) {
      const torch::Tensor values =
          torch::stack({torch::full({2}, first), torch::full({2}, second)}).to(dtype);
      return torch::sparse_coo_tensor(torch::tensor({{1, 1}}), values, {4, 2});
    };
    w.mutable_grad() = sparse(3.0, 5.0);
    scaler.scale(torch::ones({}));
    const StepReport report = scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(report.applied);
    EXPECT_NEAR(report.grad_norm, std::sqrt(32.0), 1e-6) << "the norm of the summed duplicates";
    EXPECT_EQ(value(w[1][0]), -4.0);
    EXPECT_EQ(value(w[0][0]), 0.0);

    w.mutable_grad() = sparse(64000.0, 64000.0);
    scaler.scale(torch::ones({}));
    EXPECT_EQ(scaler.step(optimizer).applied, dtype == torch::kFloat)
        << "in FP16 the sum of finite duplicates overflows";
  }
}

TEST(Step, WorksWithSparseEmbeddings) {
  GradScaler scaler(GradScalerOptions().init_scale(16));
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true));
  const torch::Tensor before = embedding->weight.detach().clone();
  auto optimizer = sgd(embedding->parameters());
  scaler.scale(embedding->forward(torch::tensor({1, 1, 4})).sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer).applied);
  const torch::Tensor change = (before - embedding->weight.detach()).select(1, 0);
  EXPECT_TRUE(torch::allclose(change, torch::tensor({0.0f, 2.0f, 0.0f, 0.0f, 1.0f}), 1e-5, 1e-6));
}

TEST(Step, IgnoresUndefinedGradients) {
  GradScaler scaler;
  torch::Tensor a = leaf({1.0f}), b = leaf({1.0f});
  auto optimizer = sgd({a, b});
  scaler.scale(a.sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_EQ(value(b), 1.0);
}

TEST(Step, AcceptsEmptyParameters) {
  GradScaler scaler;
  torch::Tensor a = torch::ones({0, 3}).requires_grad_(true), b = leaf({1.0f});
  auto optimizer = sgd({a, b});
  scaler.scale(a.sum() + b.sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_EQ(value(b), 0.0);
}

TEST(Step, ClipsByMaxNorm) {
  GradScaler scaler;
  torch::Tensor w = leaf({0.0f, 0.0f});
  auto optimizer = sgd({w});
  scaler.scale((w * torch::tensor({30.0f, 40.0f})).sum()).backward();
  const StepReport report = scaler.step(optimizer, {1.0f});
  EXPECT_NEAR(report.grad_norm, 50.0, 1e-9);
  EXPECT_NEAR(value(w[0]), -0.6, 1e-6);
  EXPECT_NEAR(value(w[1]), -0.8, 1e-6);
}

TEST(Closure, RunsOnceBeforeTheStep) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  int calls = 0;
  const StepReport report = scaler.step(optimizer, [&] {
    ++calls;
    optimizer.zero_grad();
    const torch::Tensor loss = w.sum();
    scaler.scale(loss).backward();
    return loss;
  });
  EXPECT_TRUE(report.applied);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(value(w), 0.0);
}

TEST(Closure, LbfgsIsRejected) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  torch::optim::LBFGS optimizer({w}, 1.0);
  const auto closure = [&] { return w.sum(); };
  expect_error(ErrorCode::kUnsupported, "LBFGS", [&] { scaler.step(optimizer, closure); });
}

TEST(SetScale, SetsTheScaleAndRejectsInvalidValues) {
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  scaler.update(123.0);
  EXPECT_EQ(scaler.get_scale(), 123.0);
  scaler.update(torch::full({1}, 256.0));
  EXPECT_EQ(scaler.get_scale(), 256.0);
  for (const double bad : {0.0, -1.0, kInfinity, std::nan("")}) {
    expect_error(ErrorCode::kInvalidArgument, "cannot be set", [&] { scaler.update(bad); });
  }
  expect_error(ErrorCode::kInvalidArgument, "one element",
               [&] { scaler.update(torch::ones({2})); });
  EXPECT_EQ(scaler.get_scale(), 256.0);
}

TEST(SetScale, WorksAfterAThrownOverflow) {
  GradScaler scaler(GradScalerOptions(parse_policy("torch:on_overflow=throw")));
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum() * kInfinity).backward();
  expect_error(ErrorCode::kOverflow, "Lower the scale", [&] { scaler.step(optimizer); });
  scaler.update(2.0);
  EXPECT_EQ(scaler.get_scale(), 2.0);
}

TEST(SetScale, RequiresDiscardOfPendingGradients) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum()).backward();
  expect_error(ErrorCode::kWrongOrder, "discard()", [&] { scaler.update(512.0); });
  w.mutable_grad().zero_();
  scaler.discard();
  scaler.update(512.0);
  scaler.scale(w.sum()).backward();
  EXPECT_EQ(scaler.step(optimizer).grad_norm, 1.0);
}

TEST(Settings, CanBeReadAndChangedByPyTorchsNames) {
  GradScaler scaler;
  EXPECT_EQ(scaler.get_growth_factor(), 2.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
  EXPECT_EQ(scaler.get_growth_interval(), 2000);
  EXPECT_TRUE(scaler.is_enabled());
  scaler.set_growth_factor(3.0);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(7);
  EXPECT_EQ(scaler.get_growth_factor(), 3.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_EQ(scaler.get_growth_interval(), 7);
  expect_error(ErrorCode::kInvalidArgument, "growth_factor",
               [&] { scaler.set_growth_factor(1.0); });
  expect_error(ErrorCode::kInvalidArgument, "backoff", [&] { scaler.set_backoff_factor(1.0); });
  expect_error(ErrorCode::kInvalidArgument, "interval", [&] { scaler.set_growth_interval(0); });
  EXPECT_EQ(scaler.get_growth_factor(), 3.0);
}

TEST(Settings, InvalidValuesAreRejectedByTheConstructor) {
  const auto expect_rejected = [](const char* part,
                                  const std::function<GradScalerOptions()>& options) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { GradScaler scaler(options()); });
  };
  using Options = GradScalerOptions;
  expect_rejected("init_scale", [] { return Options().init_scale(0.0); });
  expect_rejected("init_scale", [] { return Options().init_scale(std::nan("")); });
  expect_rejected("init_scale", [] { return Options().init_scale(1e300); });
  expect_rejected("growth_factor", [] { return Options().growth_factor(1.0); });
  expect_rejected("backoff_factor", [] { return Options().backoff_factor(1.0); });
  expect_rejected("backoff_factor", [] { return Options().backoff_factor(-1.0); });
  expect_rejected("growth_interval", [] { return Options().growth_interval(0); });
}

TEST(Settings, PresetsFloorAndHysteresisWork) {
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w}, 0.0);
  const auto overflow = [&](GradScaler& scaler) {
    optimizer.zero_grad();
    scaler.scale(w.sum() * kInfinity).backward();
    scaler.step(optimizer);
    scaler.update();
    return scaler.get_scale();
  };
  GradScaler megatron(preset("megatron"));
  EXPECT_EQ(megatron.get_scale(), 4294967296.0);
  GradScaler with_hysteresis(GradScalerOptions(parse_policy("torch:init_scale=8,hysteresis=2")));
  EXPECT_EQ(overflow(with_hysteresis), 8.0);
  EXPECT_EQ(overflow(with_hysteresis), 4.0);
  int alarms = 0;
  GradScaler with_callback(GradScalerOptions(parse_policy("torch:init_scale=2,min_scale=1"))
                               .on_alarm([&](const AlarmReport&) { ++alarms; }));
  EXPECT_EQ(overflow(with_callback), 1.0);
  EXPECT_EQ(overflow(with_callback), 1.0);
  EXPECT_EQ(alarms, 1);
  GradScaler without_callback(GradScalerOptions(parse_policy("torch:init_scale=1,min_scale=1")));
  expect_error(ErrorCode::kScaleCollapsed, "allows none smaller",
               [&] { overflow(without_callback); });
  EXPECT_EQ(overflow(megatron), 4294967296.0)
      << "the first overflow does not lower the scale with a hysteresis of 2";
}

TEST(Disabled, PassesEverythingThrough) {
  GradScaler scaler(GradScalerOptions().enabled(false));
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  const torch::Tensor loss = w.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_NO_THROW(scaler.step(optimizer))
      << "a disabled scaler accepts missing gradients, as in PyTorch";
  loss.backward();
  scaler.unscale_(optimizer);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_TRUE(scaler.step(optimizer).applied);
  scaler.update();
  scaler.update(7.0);
  EXPECT_EQ(value(w), -1.0);
  EXPECT_TRUE(scaler.state_dict().empty());
  EXPECT_EQ(to_json(scaler.state_dict()), "{}");
  EXPECT_NO_THROW(scaler.load_state_dict({{"scale", 0.0}}));
}

TEST(Disabled, RunsLbfgs) {
  GradScaler scaler(GradScalerOptions().enabled(false));
  torch::Tensor w = leaf({1.0f});
  torch::optim::LBFGS optimizer({w}, 1.0);
  scaler.step(optimizer, [&] {
    optimizer.zero_grad();
    const torch::Tensor loss = (w * w).sum();
    loss.backward();
    return loss;
  });
  EXPECT_NEAR(value(w), 0.0, 1e-3);
}

}  // namespace
}  // namespace headroom::libtorch
