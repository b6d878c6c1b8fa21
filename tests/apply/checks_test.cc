// Arguments that optimizers reject; a rejected call has no effect.
#include "core/cuda.h"
#include "tests/support.h"

namespace headroom {
namespace {

void expect_rejected(ErrorCode code, const std::string& part, std::vector<Parameter> parameters) {
  expect_error(code, part, [&] { AdamW optimizer(parameters); });
}

TEST(OptimizerChecks, RejectsInvalidParameters) {
  std::vector<float> w(4), g(4), g3(3);
  std::vector<double> w64(4), g64(4);
  const std::vector<float> constant(4);
  expect_rejected(ErrorCode::kMismatch, "'w' has a weight of 4", {{"w", view(w), view(g3)}});
  expect_rejected(ErrorCode::kUnsupported, "f64", {{"w", view(w64), view(g)}});
  expect_rejected(ErrorCode::kUnsupported, "f64", {{"w", view(w), view(g64)}});
  expect_rejected(ErrorCode::kInvalidArgument, "const data", {{"w", view(constant), view(g)}});
  TensorView null = view(w);
  null.data = nullptr;
  expect_rejected(ErrorCode::kInvalidArgument, "The weight of Parameter 'w' has null data",
                  {{"w", null, view(g)}});
  expect_rejected(ErrorCode::kInvalidArgument, "The gradient of Parameter 'w' has null data",
                  {{"w", view(g), null}});
  std::vector<f16> half(1);
  TensorView huge = view(half);
  huge.data = nullptr;
  huge.count = int64_t{1} << 40;
  expect_rejected(ErrorCode::kInvalidArgument, "null data", {{"w", huge, TensorView{}}});
  TensorView cuda = view(w);
  cuda.device.type = DeviceType::kCUDA;
  if (internal::built_with_cuda()) {
    expect_rejected(ErrorCode::kMismatch, "different devices", {{"w", cuda, view(g)}});
  } else {
    expect_rejected(ErrorCode::kUnsupported, "CUDA", {{"w", cuda, view(g)}});
  }
}

TEST(OptimizerChecks, RejectsSharedMemory) {
  std::vector<float> w(8), g(8);
  expect_rejected(ErrorCode::kInvalidArgument, "share memory", {{"w", view(w), view(w)}});
  expect_rejected(ErrorCode::kInvalidArgument, "share memory",
                  {{"a", view(w.data(), 5), view(g.data(), 5)},
                   {"b", view(w.data() + 4, 3), view(g.data() + 5, 3)}});
  expect_rejected(ErrorCode::kInvalidArgument, "'a'",
                  {{"a", view(w), view(g)}, {"b", view(w), TensorView{}}});
  AdamW optimizer({{"a", view(w.data(), 4), view(g.data(), 4)}});
  expect_error(ErrorCode::kInvalidArgument, "share memory", [&] {
    optimizer.add_group({{"b", view(w), view(g)}}, {});
  });
  EXPECT_EQ(optimizer.parameters().size(), 1u) << "the rejected group was not added";
  optimizer.apply(1.0f, false);
  expect_error(ErrorCode::kInvalidArgument, "share memory",
               [&] { optimizer.set_grad(0, view(w.data(), 4)); });
  EXPECT_EQ(optimizer.parameters()[0].grad.data, g.data());
  expect_error(ErrorCode::kInvalidArgument, "index 3", [&] { optimizer.set_grad(3, view(g)); });
}

TEST(OptimizerChecks, GradientMustNotShareMemoryWithAGivenMaster) {
  std::vector<f16> w(8), g(8);
  std::vector<float> master(8);
  SGD optimizer({{"w", view(w), view(g), view(master)}});
  const TensorView over_master = view(reinterpret_cast<f16*>(master.data()), 8);
  expect_error(ErrorCode::kInvalidArgument, "share memory",
               [&] { optimizer.set_grad(0, over_master); });
  EXPECT_EQ(optimizer.parameters()[0].grad.data, g.data());
}

TEST(OptimizerChecks, RejectsInvalidOptions) {
  std::vector<float> w(1), g(1);
  const std::vector<Parameter> parameters = {{"w", view(w), view(g)}};
  const auto expect_invalid = [&](const std::string& part, const AdamWOptions& options) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { AdamW optimizer(parameters, options); });
  };
  for (const double bad : {-1.0, std::nan(""), HUGE_VAL}) {
    expect_invalid("lr", {.lr = bad});
    expect_invalid("weight_decay", {.weight_decay = bad});
    expect_invalid("eps", {.eps = bad});
    expect_invalid("beta1", {.beta1 = bad});
    expect_invalid("beta2", {.beta2 = bad});
  }
  expect_invalid("beta1", {.beta1 = 1.0});
  expect_invalid("eps", {.eps = 0.0});
  expect_invalid("eps", {.eps = 1e-60});
  expect_invalid("lr", {.lr = 1e38});
  expect_invalid("lr x weight_decay", {.lr = 1e30, .weight_decay = 1e30});
  const auto expect_invalid_sgd = [&](const std::string& part, const SGDOptions& options) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { SGD optimizer(parameters, options); });
  };
  expect_invalid_sgd("momentum", {.momentum = -0.1});
  expect_invalid_sgd("dampening", {.dampening = std::nan("")});
  expect_invalid_sgd("Nesterov", {.nesterov = true});
  expect_invalid_sgd("Nesterov", {.momentum = 0.9, .dampening = 0.1, .nesterov = true});

  SGD optimizer(parameters, {.lr = 0.1});
  expect_error(ErrorCode::kInvalidArgument, "lr", [&] { optimizer.set_lr(std::nan("")); });
  expect_error(ErrorCode::kInvalidArgument, "momentum",
               [&] { optimizer.set_options({.momentum = 0.9}); });
  expect_error(ErrorCode::kInvalidArgument, "no parameter group 7",
               [&] { optimizer.set_options({}, 7); });
  EXPECT_EQ(optimizer.options().lr, 0.1);

  std::vector<float> other(1), other_grad(1);
  AdamW two_groups(parameters, {.lr = 0.1});
  two_groups.add_group({{"v", view(other), view(other_grad)}}, {.lr = 0.1, .weight_decay = 1e30});
  expect_error(ErrorCode::kInvalidArgument, "lr x weight_decay", [&] { two_groups.set_lr(1e30); });
  EXPECT_EQ(two_groups.options(0).lr, 0.1) << "no group is changed if one is invalid";
}

TEST(OptimizerChecks, AcceptsEmptyListsAndTensors) {
  AdamW empty_list({});
  empty_list.apply(1.0f, true);
  std::vector<float> empty;
  AdamW empty_tensor({{"w", view(empty), view(empty)}});
  empty_tensor.apply(1.0f, true);
  EXPECT_EQ(empty_tensor.parameters().size(), 1u);
}

}  // namespace
}  // namespace headroom
