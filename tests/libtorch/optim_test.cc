// The fused optimizers as torch::optim optimizers.
#include <cmath>
#include <sstream>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

// Steps both optimizers and expects the same weights up to rounding.
void expect_same_weights(const torch::nn::Sequential& ours, torch::optim::Optimizer& fused,
                         const torch::nn::Sequential& theirs, torch::optim::Optimizer& plain) {
  for (int step = 0; step < 20; ++step) {
    set_random_grads(ours, step);
    set_random_grads(theirs, step);
    fused.step();
    plain.step();
  }
  for (size_t i = 0; i < ours->parameters().size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours->parameters()[i], theirs->parameters()[i], 2e-6, 2e-7));
  }
}

TEST(Fused, MatchesTorchToRounding) {
  {
    const auto a = small_model(), b = small_model();
    const auto options = SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true);
    FusedSGD fused(a->parameters(), options);
    torch::optim::SGD plain(b->parameters(), options);
    expect_same_weights(a, fused, b, plain);
  }
  {
    const auto a = small_model(), b = small_model();
    const auto options = AdamOptions(0.01).weight_decay(0.1);
    FusedAdam fused(a->parameters(), options);
    torch::optim::Adam plain(b->parameters(), options);
    expect_same_weights(a, fused, b, plain);
  }
  {
    const auto a = small_model(), b = small_model();
    const auto options = AdamWOptions(0.01).betas({0.8, 0.95}).weight_decay(0.1);
    FusedAdamW fused(a->parameters(), options);
    torch::optim::AdamW plain(b->parameters(), options);
    expect_same_weights(a, fused, b, plain);
  }
}

TEST(Fused, ParameterGroupsUseTheirOwnOptions) {
  torch::Tensor a = leaf({1.0f}), b = leaf({1.0f}), c = leaf({1.0f});
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{a}, std::make_unique<SGDOptions>(0.5));
  groups.emplace_back(std::vector<torch::Tensor>{b});
  FusedSGD optimizer(groups, SGDOptions(0.25));
  optimizer.add_param_group(OptimizerParamGroup({c}, std::make_unique<SGDOptions>(0.125)));
  for (torch::Tensor* w : {&a, &b, &c}) w->mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_EQ(value(a), 0.5);
  EXPECT_EQ(value(b), 0.75);
  EXPECT_EQ(value(c), 0.875);
}

TEST(Fused, WorksWithLrSchedulers) {
  torch::Tensor ours = leaf({0.0f}), theirs = leaf({0.0f});
  FusedSGD fused({ours}, SGDOptions(1.0));
  auto plain = sgd({theirs});
  torch::optim::StepLR our_scheduler(fused, 1, 0.5), their_scheduler(plain, 1, 0.5);
  for (int i = 0; i < 4; ++i) {
    for (torch::Tensor* w : {&ours, &theirs}) w->mutable_grad() = torch::ones({1});
    fused.step();
    plain.step();
    our_scheduler.step();
    their_scheduler.step();
    EXPECT_EQ(value(ours), value(theirs));
  }
  EXPECT_LT(fused.param_groups()[0].options().get_lr(), 1.0);
}

TEST(Fused, RunsTheClosure) {
  torch::Tensor w = leaf({1.0f});
  FusedSGD optimizer({w}, SGDOptions(1.0));
  const torch::NoGradGuard no_grad;
  const torch::Tensor loss = optimizer.step([&] {
    const torch::Tensor inside = w.sum();
    inside.backward();
    return inside;
  });
  EXPECT_EQ(value(loss), 1.0);
  EXPECT_EQ(value(w), 0.0);
}

TEST(Fused, ParametersWithoutAGradientAreNotUpdated) {
  torch::Tensor a = leaf({1.0f}), b = leaf({1.0f});
  FusedAdamW optimizer({a, b}, AdamWOptions(0.1));
  a.mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_NE(value(a), 1.0);
  EXPECT_EQ(value(b), 1.0);
  EXPECT_EQ(optimizer.steps(0), 1);
  EXPECT_EQ(optimizer.steps(1), 0);
  optimizer.zero_grad();
  EXPECT_TRUE(!a.grad().defined() || value(a.grad()) == 0.0);
  a.mutable_grad() = torch::Tensor();
  EXPECT_NO_THROW(optimizer.step());
}

TEST(Fused, KeepsMastersOf16BitParameters) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    torch::Tensor w = leaf({1.0f}, dtype);
    FusedSGD optimizer({w}, SGDOptions(1.0));
    for (int i = 0; i < 1000; ++i) {
      w.mutable_grad() = torch::full({1}, -0x1p-13).to(dtype);
      optimizer.step();
    }
    EXPECT_NEAR(value(optimizer.master_params()[0]), 1.0 + 1000 * 0x1p-13, 1e-6);
    EXPECT_NEAR(value(w), 1.0 + 1000 * 0x1p-13, 0x1p-8)
        << "without a master the weight would not change";
    torch::Tensor without_master = leaf({1.0f}, dtype);
    FusedSGD no_masters({without_master}, SGDOptions(1.0), {false});
    without_master.mutable_grad() = torch::full({1}, -0x1p-13).to(dtype);
    no_masters.step();
    EXPECT_EQ(value(without_master), 1.0);
  }
}

TEST(Fused, IncrementsTheVersionOfUpdatedParameters) {
  torch::Tensor w = leaf({1.0f});
  FusedSGD optimizer({w}, SGDOptions(1.0));
  const torch::Tensor loss = (w * w).sum();
  w.mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error)
      << "autograd detects the in-place change since the forward pass";
}

TEST(Fused, AcceptsStridedAndSparseGradients) {
  torch::Tensor w = torch::zeros({3, 2}).requires_grad_(true);
  FusedSGD optimizer({w}, SGDOptions(1.0));
  const torch::Tensor grad = torch::arange(6.0).reshape({2, 3}).t();
  w.mutable_grad() = grad;
  optimizer.step();
  EXPECT_TRUE(torch::equal(w, -grad));
  w.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1, 1}, {0, 0}}),
                                              torch::tensor({1.0f, 2.0f}), {3, 2});
  optimizer.step();
  EXPECT_EQ(value(w[1][0]), -4.0);
}

TEST(Fused, AcceptsChannelsLastWeights) {
  torch::Tensor w =
      torch::randn({4, 3, 2, 2}).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_(true);
  const torch::Tensor before = w.detach().clone();
  FusedSGD optimizer({w}, SGDOptions(1.0));
  const torch::Tensor grad = torch::randn({4, 3, 2, 2});
  w.mutable_grad() = grad;
  optimizer.step();
  EXPECT_TRUE(torch::allclose(w, before - grad));
}

TEST(Fused, RejectsUnsupportedParameters) {
  using Params = std::vector<torch::Tensor>;
  expect_error(ErrorCode::kUnsupported, "f64",
               [] { FusedAdamW optimizer(Params{torch::ones({2}, torch::kDouble)}); });
  expect_error(ErrorCode::kUnsupported, "dense", [] {
    FusedAdamW optimizer(Params{torch::ones({4, 4}).slice(1, 0, 4, 2)});
  });
  expect_error(ErrorCode::kUnsupported, "complex",
               [] { FusedAdamW optimizer(Params{torch::ones({2}, torch::kComplexFloat)}); });
  expect_error(ErrorCode::kUnsupported, "amsgrad", [] {
    FusedAdamW optimizer(Params{torch::ones({2})}, AdamWOptions().amsgrad(true));
  });
  const torch::Tensor twice = torch::ones({2});
  EXPECT_ANY_THROW(FusedAdamW optimizer(Params({twice, twice})));
  torch::Tensor w = torch::ones({2});
  w.mutable_grad() = torch::ones({2});
  FusedSGD optimizer({w}, SGDOptions(1.0));
  optimizer.step();  // allocates the state, for this type
  w.set_data(torch::ones({2}, torch::kHalf));
  expect_error(ErrorCode::kMismatch, "new optimizer", [&] { optimizer.step(); });
}

TEST(FusedWithScaler, MatchesTorchAndLeavesGradientsUnchanged) {
  auto ours = small_model(), theirs = small_model();
  FusedAdamW fused(ours->parameters(), AdamWOptions(0.01));
  torch::optim::AdamW plain(theirs->parameters(), AdamWOptions(0.01));
  GradScaler scaler;
  for (int step = 0; step < 10; ++step) {
    torch::manual_seed(step);
    const torch::Tensor x = torch::randn({8, 5});
    fused.zero_grad();
    plain.zero_grad();
    scaler.scale(ours->forward(x).pow(2).sum()).backward();
    const torch::Tensor before = ours->parameters()[0].grad().clone();
    const StepReport report = scaler.step(fused, {1.0f});
    scaler.update();
    EXPECT_TRUE(report.applied);
    EXPECT_TRUE(same_bits(ours->parameters()[0].grad(), before)) << "gradients are only read";
    theirs->forward(x).pow(2).sum().backward();
    torch::nn::utils::clip_grad_norm_(theirs->parameters(), 1.0);
    plain.step();
  }
  for (size_t i = 0; i < ours->parameters().size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours->parameters()[i], theirs->parameters()[i], 1e-4, 1e-6));
  }
}

TEST(FusedWithScaler, AppliesFp16GradientsThatWouldUnderflowUnscaled) {
  // 2^-26 underflows in FP16. Scaled by 2^16 it fits, and it is never written back unscaled.
  torch::Tensor w = leaf({0.0f}, torch::kHalf);
  FusedSGD optimizer({w}, SGDOptions(0x1p+20));
  GradScaler scaler;
  scaler.scale(w.to(torch::kFloat).sum() * 0x1p-26).backward();
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_EQ(value(w), -0x1p-6);
}

TEST(FusedWithScaler, SkippedStepLeavesWeightsAndStateUnchanged) {
  torch::Tensor w = leaf({1.0f, 2.0f}, torch::kHalf);
  FusedAdamW optimizer({w}, AdamWOptions(0.1));
  GradScaler scaler;
  const torch::Tensor before = w.detach().clone();
  scaler.scale(w.to(torch::kFloat).sum() * std::numeric_limits<double>::infinity()).backward();
  const StepReport report = scaler.step(optimizer);
  scaler.update();
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(optimizer.steps(0), 0);
  EXPECT_TRUE(same_bits(w, before));
  EXPECT_EQ(value(w.grad().abs().sum()), 0.0);
}

TEST(FusedWithScaler, ClearsGradientsWhenRequested) {
  torch::Tensor w = torch::zeros({2, 2}).requires_grad_(true);
  FusedSGD optimizer({w}, SGDOptions(1.0));
  GradScaler scaler;
  for (const bool transposed : {false, true}) {
    w.mutable_grad() = transposed ? torch::ones({2, 2}).t() : torch::ones({2, 2});
    scaler.scale(torch::ones({}));
    scaler.step(optimizer, {.clear_grads = ClearGrads::kAlways});
    scaler.update();
    EXPECT_EQ(value(w.grad().abs().sum()), 0.0);
  }
}

template <typename Optimizer, typename Options>
void expect_round_trip(torch::ScalarType dtype, const Options& options) {
  const auto model = small_model(dtype);
  Optimizer optimizer(model->parameters(), options);
  for (int step = 0; step < 3; ++step) {
    set_random_grads(model, step);
    optimizer.step();
  }
  std::stringstream weights, state;
  torch::save(model, weights);
  torch::save(optimizer, state);
  auto copy = small_model(dtype);
  Options other = options;
  other.set_lr(0.5);
  Optimizer resumed(copy->parameters(), other);
  torch::load(copy, weights);
  torch::load(resumed, state);
  EXPECT_EQ(resumed.steps(0), 3);
  EXPECT_EQ(resumed.param_groups()[0].options().get_lr(), options.get_lr());
  for (int step = 3; step < 6; ++step) {
    set_random_grads(model, step);
    set_random_grads(copy, step);
    optimizer.step();
    resumed.step();
  }
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(model->parameters()[i], copy->parameters()[i]));
    EXPECT_TRUE(same_bits(optimizer.master_params()[i], resumed.master_params()[i]));
  }
}

TEST(FusedFiles, ResumingIsBitIdentical) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    expect_round_trip<FusedSGD>(dtype, SGDOptions(0.01).momentum(0.9));
    expect_round_trip<FusedSGD>(dtype, SGDOptions(0.01));
    expect_round_trip<FusedAdam>(dtype, AdamOptions(0.01));
    expect_round_trip<FusedAdamW>(dtype, AdamWOptions(0.01));
  }
}

TEST(FusedFiles, AreInterchangeableWithTorchOptim) {
  const auto a = small_model(), b = small_model(), c = small_model();
  FusedAdamW fused(a->parameters(), AdamWOptions(0.01));
  torch::optim::AdamW plain(b->parameters(), AdamWOptions(0.01));  // 1.13 does not load options
  FusedAdamW back(c->parameters(), AdamWOptions(0.5));
  set_random_grads(a, 0);
  fused.step();
  std::stringstream to_torch, to_fused;
  torch::save(fused, to_torch);
  torch::load(plain, to_torch);
  torch::save(plain, to_fused);
  torch::load(back, to_fused);
  for (const auto& copy : {b, c}) {
    for (size_t i = 0; i < a->parameters().size(); ++i) {
      copy->parameters()[i].data().copy_(a->parameters()[i].data());
    }
  }
  for (const auto& model : {a, b, c}) set_random_grads(model, 1);
  fused.step();
  plain.step();
  back.step();
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(torch::allclose(a->parameters()[i], b->parameters()[i], 1e-6, 1e-7));
    EXPECT_TRUE(same_bits(a->parameters()[i], c->parameters()[i]));
  }
}

TEST(FusedFiles, OfAnotherModelAreRejected) {
  const auto model = small_model();
  FusedAdamW optimizer(model->parameters());
  set_random_grads(model, 0);
  optimizer.step();
  std::stringstream state;
  torch::save(optimizer, state);
  torch::nn::Sequential other(torch::nn::Linear(3, 7), torch::nn::Linear(7, 2));
  FusedAdamW wrong(other->parameters());
  expect_error(ErrorCode::kBadState, "another model", [&] { torch::load(wrong, state); });
}

TEST(FusedFiles, CountsAreKeptWhenAGroupIsNew) {
  const auto options = SGDOptions(0.01).momentum(0.9);
  torch::Tensor old = leaf({1.0f, 2.0f}), late = leaf({3.0f});
  FusedSGD optimizer({old}, options);
  for (int step = 0; step < 5; ++step) {
    old.mutable_grad() = torch::ones({2});
    optimizer.step();
  }
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({late}));
  std::stringstream file;
  torch::save(optimizer, file);
  EXPECT_EQ(optimizer.steps(1), 0);
  FusedSGD loaded(
      {torch::optim::OptimizerParamGroup({old}), torch::optim::OptimizerParamGroup({late})},
      options);
  torch::load(loaded, file);
  EXPECT_EQ(loaded.steps(0), 5);
  EXPECT_EQ(loaded.steps(1), 0);
}

TEST(FusedState, TransfersToAnotherOptimizerBitwise) {
  auto a = small_model(), b = small_model();
  a->to(torch::kHalf);
  b->to(torch::kHalf);
  FusedAdamW one(a->parameters(), AdamWOptions(0.01));
  FusedAdamW two(b->parameters(), AdamWOptions(0.01));
  set_random_grads(a, 0);
  one.step();
  two.load_fused_state(one.fused_state());
  for (const auto& model : {a, b}) set_random_grads(model, 1);
  one.step();
  two.step();
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(a->parameters()[i], b->parameters()[i]));
    EXPECT_TRUE(same_bits(one.master_params()[i], two.master_params()[i]));
  }
  EXPECT_EQ(two.fused_state().steps, one.fused_state().steps);
  EXPECT_EQ(one.fused_state().tensors[0].name, "master");
}

TEST(FusedState, MismatchedStateIsRejectedWithoutEffect) {
  const auto model = small_model();
  FusedAdamW optimizer(model->parameters());
  set_random_grads(model, 0);
  optimizer.step();
  const torch::Tensor before = optimizer.fused_state().tensors[0].tensor.clone();
  const auto expect_rejected = [&](const char* part,
                                   const std::function<void(FusedState&)>& change) {
    FusedState state = optimizer.fused_state();
    for (StateTensor& item : state.tensors) item.tensor = item.tensor.clone().fill_(0.5);
    change(state);
    expect_error(ErrorCode::kBadState, part, [&] { optimizer.load_fused_state(state); });
    EXPECT_TRUE(same_bits(optimizer.fused_state().tensors[0].tensor, before));
  };
  expect_rejected("other tensors", [](FusedState& state) { state.tensors.pop_back(); });
  expect_rejected("other tensors", [](FusedState& state) { state.tensors[1].name = "master"; });
  expect_rejected("another size",
                  [](FusedState& state) { state.tensors[1].tensor = torch::ones({1}); });
  expect_rejected("another size",
                  [](FusedState& state) { state.tensors[1].tensor = torch::Tensor(); });
  expect_rejected("parameters", [](FusedState& state) { state.steps.clear(); });
  expect_rejected("step count", [](FusedState& state) { state.steps[0] = -1; });
  expect_rejected("inf or nan", [](FusedState& state) { state.tensors.back().tensor.fill_(NAN); });
}

}  // namespace
}  // namespace headroom::libtorch
