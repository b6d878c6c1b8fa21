// Fused optimizers detect weights that other code modifies, moves or saves.
#include <sstream>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

TEST(FusedWeights, ModifiedWeightsUpdateTheMasters) {
  torch::Tensor w = leaf({1.0f, 2.0f}, torch::kHalf);
  FusedSGD optimizer({w}, SGDOptions(1.0));
  w.mutable_grad() = torch::ones({2}, torch::kHalf);
  optimizer.step();
  {
    const torch::NoGradGuard no_grad;
    w.fill_(8.0);
  }
  optimizer.step();
  EXPECT_EQ(value(w[0]), 7.0);
  w.set_data(torch::full({2}, 4.0, torch::kHalf));  // as torch::load(model) does
  optimizer.step();
  EXPECT_EQ(value(w[1]), 3.0);
}

// Where a step refuses one gradient, the next must not use the earlier memory of another.
template <typename Optimizer>
void expect_new_gradients_after_a_refusal(Optimizer&& optimizer, torch::Tensor w,
                                          torch::Tensor refused) {
  GradScaler scaler(GradScalerOptions().init_scale(1024.0));
  const auto set_gradients = [&](float gradient, const torch::Tensor& other) {
    scaler.scale(torch::ones({}, torch::requires_grad())).backward();
    w.mutable_grad() = torch::full({1000}, 1024.0f * gradient);
    refused.mutable_grad() = other;
  };
  set_gradients(1.0f, torch::Tensor());
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(value(w[0]), -1.0);
  const torch::Tensor earlier = w.grad();
  set_gradients(2.0f, torch::ones({7}));
  EXPECT_THROW(scaler.step(optimizer), Error);
  refused.mutable_grad() = torch::Tensor();
  EXPECT_TRUE(scaler.step(optimizer).applied);
  EXPECT_EQ(value(w[0]), -3.0);
}

TEST(FusedWeights, StepAfterARefusedOneUsesTheNewGradients) {
  const auto zeros = [](int64_t count) { return torch::zeros({count}).requires_grad_(); };
  torch::Tensor w = zeros(1000), refused = zeros(8);
  expect_new_gradients_after_a_refusal(sgd({w, refused}), w, refused);
  w = zeros(1000);
  const std::vector<torch::Tensor> both = {w, refused};
  expect_new_gradients_after_a_refusal(FusedSGD(both, SGDOptions(1.0)), w, refused);
}

TEST(FusedWeights, RefusedMemoryFormatLeavesTheMomentsAsTheyWere) {
  torch::Tensor image = torch::randn({4, 3, 2, 2}).requires_grad_();
  torch::Tensor other = torch::randn({8}).requires_grad_();
  FusedAdamW optimizer({image, other}, AdamWOptions(1e-3));
  image.mutable_grad() = torch::randn({4, 3, 2, 2});
  other.mutable_grad() = torch::randn({8});
  optimizer.step();
  const torch::Tensor before = optimizer.fused_state().tensors[0].tensor.clone();
  const torch::Tensor kept = other.data().clone();
  image.set_data(image.data().contiguous(at::MemoryFormat::ChannelsLast));
  other.set_data(torch::empty({0}).set_(image.storage(), 0, {8}));  // shares memory with it
  EXPECT_THROW(optimizer.step(), Error);
  other.set_data(kept);
  EXPECT_TRUE(torch::equal(optimizer.fused_state().tensors[0].tensor, before));
}

TEST(FusedWeights, ReplacedWeightAtAReusedAddressUpdatesTheMasters) {
  torch::Tensor w = leaf(std::vector<float>(1000, 1.0f), torch::kHalf);
  FusedSGD optimizer({w}, SGDOptions(1.0));
  for (int i = 0; i < 50; ++i) {
    w.mutable_grad() = torch::ones({1000}, torch::kHalf);
    optimizer.step();
    w.set_data(w.data().to(torch::kFloat));  // frees memory that the next allocation may reuse
    w.set_data(torch::full({1000}, 9.0f).to(torch::kHalf));
    optimizer.step();
    ASSERT_EQ(value(w[0]), 8.0);
  }
}

TEST(FusedWeights, WritesThroughDataAreKept) {
  for (const int64_t count : {10, 100003}) {
    torch::Tensor w = torch::ones({count}, torch::kHalf).requires_grad_();
    FusedSGD optimizer({w}, SGDOptions(1.0));
    for (const double written : {3.0, 5.0}) {
      w.data().fill_(written);  // does not change the tensor's version
      w.mutable_grad() = torch::ones({count}, torch::kHalf);
      optimizer.step();
      EXPECT_TRUE(torch::equal(w, torch::full_like(w, written - 1.0)));
    }
    w.data()[count - 1] = 9.0;
    EXPECT_EQ(value(optimizer.master_params()[0][count - 1]), 9.0);
    w.data().fill_(7.0);
    optimizer.refresh_masters();
    optimizer.step();
    EXPECT_EQ(value(w[0]), 6.0);
  }
}

TEST(FusedWeights, ModelMayChangeItsTypeBeforeTheFirstStep) {
  const auto early = small_model(torch::kBFloat16);
  torch::nn::Sequential late = small_model(torch::kFloat);
  FusedAdamW first(early->parameters(), AdamWOptions(1e-2));
  FusedAdamW second(late->parameters(), AdamWOptions(1e-2));
  late->to(torch::kBFloat16);
  for (size_t i = 0; i < early->parameters().size(); ++i) {
    const torch::NoGradGuard no_grad;
    late->parameters()[i].copy_(early->parameters()[i]);
  }
  for (int step = 0; step < 3; ++step) {
    set_random_grads(early, step);
    set_random_grads(late, step);
    first.step();
    second.step();
  }
  for (size_t i = 0; i < early->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(early->parameters()[i], late->parameters()[i])) << i;
    EXPECT_TRUE(torch::equal(first.master_params()[i], second.master_params()[i])) << i;
  }
}

TEST(FusedWeights, RestoredWeightsKeepTheirMasters) {
  const auto model = small_model(torch::kBFloat16);
  FusedAdamW optimizer(model->parameters(), AdamWOptions(1e-4));
  set_random_grads(model, 0);
  optimizer.step();
  std::vector<torch::Tensor> exact;
  for (const torch::Tensor& master : optimizer.master_params()) exact.push_back(master.clone());
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : model->parameters()) {
      const torch::Tensor kept = parameter.clone();
      parameter.zero_();
      parameter.copy_(kept);
    }
  }
  const auto masters = optimizer.master_params();
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_TRUE(same_bits(masters[i], exact[i]));
}

TEST(FusedWeights, MomentsFollowAChangeOfStrides) {
  for (const auto dtype : {torch::kFloat, torch::kHalf}) {
    torch::Tensor a = torch::randn({4, 3, 2, 2}).to(dtype).requires_grad_(true);
    torch::Tensor b = a.detach().clone().requires_grad_(true);
    FusedAdamW one({a}, AdamWOptions(0.01)), two({b}, AdamWOptions(0.01));
    for (int step = 0; step < 6; ++step) {
      if (step == 3) b.set_data(b.data().contiguous(torch::MemoryFormat::ChannelsLast));
      const torch::Tensor grad = torch::randn({4, 3, 2, 2}).to(dtype);
      a.mutable_grad() = grad;
      b.mutable_grad() = grad;
      one.step();
      two.step();
    }
    EXPECT_NE(a.strides(), b.strides());
    EXPECT_TRUE(same_bits(a, b));
    EXPECT_TRUE(same_bits(one.master_params()[0], two.master_params()[0]));
    b.mutable_grad() = torch::Tensor();
    b.set_data(b.data().contiguous().reshape({3, 4, 2, 2}));
    expect_error(ErrorCode::kMismatch, "another shape", [&] { two.step(); });
  }
}

TEST(FusedWeights, FailureDuringAChangeOfStridesKeepsTheMasters) {
  GradScaler scaler(GradScalerOptions().init_scale(4.0).growth_interval(1));
  torch::Tensor w = torch::randn({4, 3, 2, 2}).to(torch::kHalf).requires_grad_(true);
  torch::Tensor other = leaf({1.0f});
  FusedSGD optimizer({w}, SGDOptions(1e-3));
  auto plain = sgd({other});
  scaler.scale(w.to(torch::kFloat).square().sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  const torch::Tensor exact = optimizer.master_params()[0].clone();
  w.set_data(w.data().contiguous(torch::MemoryFormat::ChannelsLast));
  w.mutable_grad() = torch::zeros({4, 3, 2, 2}, torch::kHalf);
  w.grad().storage().unsafeGetStorageImpl()->set_nbytes(4);
  scaler.scale(other.sum()).backward();
  scaler.step(plain);
  expect_error(ErrorCode::kInvalidArgument, "gradient of", [&] { scaler.update(); });
  w.mutable_grad() = torch::Tensor();
  scaler.update();
  EXPECT_TRUE(same_bits(optimizer.master_params()[0], exact));
}

TEST(FusedWeights, TruncatedStorageIsRejected) {
  torch::Tensor w = torch::ones({100});
  FusedSGD optimizer({w}, SGDOptions(1.0));
  w.mutable_grad() = torch::ones({100});
  w.storage().unsafeGetStorageImpl()->set_nbytes(200);
  expect_error(ErrorCode::kInvalidArgument, "needs 400 bytes", [&] { optimizer.step(); });
  w.storage().unsafeGetStorageImpl()->set_nbytes(400);
  optimizer.step();
  EXPECT_EQ(value(w[99]), 0.0);
}

TEST(FusedWeights, FilesContainModifiedWeights) {
  torch::Tensor w = leaf({1.0f, 2.0f}, torch::kHalf);
  FusedAdamW optimizer({w}, AdamWOptions(0.01));
  {
    const torch::NoGradGuard no_grad;
    w.fill_(5.0);  // as loading a pretrained file would
  }
  std::stringstream state;
  torch::save(optimizer, state);
  torch::Tensor copy = leaf({5.0f, 5.0f}, torch::kHalf);
  FusedAdamW resumed({copy}, AdamWOptions(0.01));
  torch::load(resumed, state);
  EXPECT_EQ(value(copy[0]), 5.0);
  EXPECT_EQ(value(resumed.master_params()[0][1]), 5.0);
}

TEST(FusedWeights, LoadingTheOptimizerDoesNotOverwriteTheModel) {
  const auto model = small_model(torch::kBFloat16);
  FusedAdamW optimizer(model->parameters(), AdamWOptions(1e-4));
  set_random_grads(model, 0);
  optimizer.step();
  std::stringstream weights, state, state_copy;
  torch::save(model, weights);
  torch::save(optimizer, state);
  state_copy << state.str();

  auto other = small_model(torch::kBFloat16);
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : other->parameters()) parameter.fill_(0.5);
  }
  FusedAdamW averaged(other->parameters(), AdamWOptions(1e-4));
  torch::load(averaged, state);
  EXPECT_EQ(value(other->parameters()[0][0][0]), 0.5);
  EXPECT_EQ(value(averaged.master_params()[0][0][0]), 0.5);

  auto fresh = small_model(torch::kBFloat16);
  FusedAdamW resumed(fresh->parameters(), AdamWOptions(1e-4));
  torch::load(resumed, state_copy);  // loads the optimizer before the model
  torch::load(fresh, weights);
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(resumed.master_params()[i], optimizer.master_params()[i]));
    EXPECT_TRUE(same_bits(fresh->parameters()[i], model->parameters()[i]));
  }
}

}  // namespace
}  // namespace headroom::libtorch
