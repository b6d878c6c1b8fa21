// What an optimizer refuses, leaving everything as it was.
#include "core/cuda.h"
#include "tests/support.h"

namespace headroom {
namespace {

void expect_refused(ErrorCode code, const std::string& part, std::vector<Parameter> parameters) {
  expect_error(code, part, [&] { AdamW optimizer(parameters); });
}

TEST(OptimizerChecks, RefusesParametersThatDoNotFit) {
  std::vector<float> w(4), g(4), g3(3);
  std::vector<double> w64(4), g64(4);
  const std::vector<float> constant(4);
  expect_refused(ErrorCode::kMismatch, "'w' has a weight of 4", {{"w", view(w), view(g3)}});
  expect_refused(ErrorCode::kUnsupported, "f64", {{"w", view(w64), view(g)}});
  expect_refused(ErrorCode::kUnsupported, "f64", {{"w", view(w), view(g64)}});
  expect_refused(ErrorCode::kInvalidArgument, "const data", {{"w", view(constant), view(g)}});
  TensorView null = view(w);
  null.data = nullptr;
  expect_refused(ErrorCode::kInvalidArgument, "The weight of Parameter 'w' has null data",
                 {{"w", null, view(g)}});
  expect_refused(ErrorCode::kInvalidArgument, "The gradient of Parameter 'w' has null data",
                 {{"w", view(g), null}});
  std::vector<f16> half(1);
  TensorView huge = view(half);
  huge.data = nullptr;
  huge.count = int64_t{1} << 40;
  expect_refused(ErrorCode::kInvalidArgument, "null data", {{"w", huge, TensorView{}}});
  TensorView cuda = view(w);
  cuda.device.type = DeviceType::kCUDA;
  if (internal::built_with_cuda()) {
    expect_refused(ErrorCode::kMismatch, "different devices", {{"w", cuda, view(g)}});
  } else {
    expect_refused(ErrorCode::kUnsupported, "CUDA", {{"w", cuda, view(g)}});
  }
}

TEST(OptimizerChecks, RefusesSharedMemory) {
  std::vector<float> w(8), g(8);
  expect_refused(ErrorCode::kInvalidArgument, "share memory", {{"w", view(w), view(w)}});
  expect_refused(ErrorCode::kInvalidArgument, "share memory",
                 {{"a", view(w.data(), 5), view(g.data(), 5)},
                  {"b", view(w.data() + 4, 3), view(g.data() + 5, 3)}});
  expect_refused(ErrorCode::kInvalidArgument, "'a'",
                 {{"a", view(w), view(g)}, {"b", view(w), TensorView{}}});
  AdamW optimizer({{"a", view(w.data(), 4), view(g.data(), 4)}});
  expect_error(ErrorCode::kInvalidArgument, "share memory", [&] {
    optimizer.add_group({{"b", view(w), view(g)}}, {});
  });
  EXPECT_EQ(optimizer.parameters().size(), 1u) << "nothing was added";
  optimizer.apply(1.0f, false);
  expect_error(ErrorCode::kInvalidArgument, "share memory",
               [&] { optimizer.set_grad(0, view(w.data(), 4)); });
  EXPECT_EQ(optimizer.parameters()[0].grad.data, g.data());
  expect_error(ErrorCode::kInvalidArgument, "index 3", [&] { optimizer.set_grad(3, view(g)); });
}

TEST(OptimizerChecks, RefusesImpossibleOptions) {
  std::vector<float> w(1), g(1);
  const std::vector<Parameter> parameters = {{"w", view(w), view(g)}};
  const auto refuse = [&](const std::string& part, const AdamWOptions& options) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { AdamW optimizer(parameters, options); });
  };
  for (const double bad : {-1.0, std::nan(""), HUGE_VAL}) {
    refuse("lr", {.lr = bad});
    refuse("weight_decay", {.weight_decay = bad});
    refuse("eps", {.eps = bad});
    refuse("beta1", {.beta1 = bad});
    refuse("beta2", {.beta2 = bad});
  }
  refuse("beta1", {.beta1 = 1.0});
  refuse("eps", {.eps = 0.0});
  refuse("eps", {.eps = 1e-60});
  refuse("lr", {.lr = 1e38});
  refuse("lr x weight_decay", {.lr = 1e30, .weight_decay = 1e30});
  const auto refuse_sgd = [&](const std::string& part, const SGDOptions& options) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { SGD optimizer(parameters, options); });
  };
  refuse_sgd("momentum", {.momentum = -0.1});
  refuse_sgd("dampening", {.dampening = std::nan("")});
  refuse_sgd("Nesterov", {.nesterov = true});
  refuse_sgd("Nesterov", {.momentum = 0.9, .dampening = 0.1, .nesterov = true});

  SGD optimizer(parameters, {.lr = 0.1});
  expect_error(ErrorCode::kInvalidArgument, "lr", [&] { optimizer.set_lr(std::nan("")); });
  expect_error(ErrorCode::kInvalidArgument, "momentum",
               [&] { optimizer.set_options({.momentum = 0.9}); });
  expect_error(ErrorCode::kInvalidArgument, "no parameter group 7",
               [&] { optimizer.set_options({}, 7); });
  EXPECT_EQ(optimizer.options().lr, 0.1);

  std::vector<float> other(1), other_grad(1);
  AdamW two(parameters, {.lr = 0.1});
  two.add_group({{"v", view(other), view(other_grad)}}, {.lr = 0.1, .weight_decay = 1e30});
  expect_error(ErrorCode::kInvalidArgument, "lr x weight_decay", [&] { two.set_lr(1e30); });
  EXPECT_EQ(two.options(0).lr, 0.1) << "all groups or none";
}

TEST(OptimizerChecks, EmptyListsAndEmptyTensorsAreFine) {
  AdamW none({});
  none.apply(1.0f, true);
  std::vector<float> empty;
  AdamW nothing({{"w", view(empty), view(empty)}});
  nothing.apply(1.0f, true);
  EXPECT_EQ(nothing.parameters().size(), 1u);
}

}  // namespace
}  // namespace headroom
