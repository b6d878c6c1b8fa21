// Watch: names the first operation that leaves the range, in forward and backward.
#include <headroom/libtorch/watch.h>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

struct Model : torch::nn::Module {
  torch::nn::Linear fc{nullptr};
  std::function<torch::Tensor(torch::Tensor)> head;

  explicit Model(std::function<torch::Tensor(torch::Tensor)> then) : head(std::move(then)) {
    fc = register_module("fc", torch::nn::Linear(4, 4));
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(1.0);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y;
    {
      const WatchScope scope("fc");
      y = fc->forward(x);
    }
    const WatchScope scope("head");
    return head(y);
  }
};

RangeReport watched(Model& model, const torch::Tensor& x) {
  Watch watch(model);
  watch.begin();
  model.forward(x).sum().backward();
  watch.finish();
  EXPECT_TRUE(watch.ready());
  return RangeReport(watch.rows());
}

std::string first_bad(const RangeReport& report) {
  return report.first_bad() < 0 ? ""
                                : report.rows()[static_cast<size_t>(report.first_bad())].label();
}

TEST(LibtorchWatch, NamesTheFirstFaultyOperationOfForward) {
  Model overflow([](torch::Tensor y) { return torch::exp(y * 40.0); });
  const RangeReport report = watched(overflow, torch::ones({2, 4}));
  EXPECT_EQ(first_bad(report), "head: exp");
  EXPECT_TRUE(report.inputs_finite(report.first_bad()));
}

TEST(LibtorchWatch, NamesTheOperationWhoseBackwardIsFaulty) {
  Model root([](torch::Tensor y) { return torch::sqrt(y - y.detach()); });
  EXPECT_EQ(first_bad(watched(root, torch::ones({2, 4}))), "head: backward of sqrt");
}

TEST(LibtorchWatch, NamesParametersAndInputs) {
  Model model([](torch::Tensor y) { return y * 2.0; });
  torch::Tensor bad = torch::ones({2, 4});
  bad[0][1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(first_bad(watched(model, bad)), "input from outside");
  torch::NoGradGuard no_grad;
  model.fc->weight[2][1] = std::numeric_limits<float>::infinity();
  torch::AutoGradMode grad(true);
  EXPECT_EQ(first_bad(watched(model, torch::ones({2, 4}))), "parameter fc.weight");
}

TEST(LibtorchWatch, MasksAreNoFault) {
  Model masked([](torch::Tensor y) {
    const torch::Tensor upper = torch::ones({4, 4}).triu(1).to(torch::kBool);
    return torch::softmax(torch::matmul(y, y.t()).masked_fill(upper, -INFINITY), -1);
  });
  EXPECT_EQ(first_bad(watched(masked, torch::ones({4, 4}))), "");
}

TEST(LibtorchWatch, MeasuresOnlyBetweenBeginAndFinishAndDoesNotChangeGradients) {
  Model model([](torch::Tensor y) { return y.tanh() * y; });
  model.forward(torch::ones({2, 4})).sum().backward();
  const torch::Tensor expected = model.fc->weight.grad().clone();
  model.zero_grad();
  Watch watch(model);
  watch.finish();
  EXPECT_FALSE(watch.ready());
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    watch.begin();
    Watch second(model);
    expect_error(ErrorCode::kWrongOrder, "Another Watch", [&] { second.begin(); });
    model.forward(torch::ones({2, 4})).sum().backward();
    watch.finish();
    EXPECT_TRUE(torch::equal(model.fc->weight.grad(), expected));
    const size_t rows = watch.rows().size();
    model.forward(torch::ones({2, 4}));
    EXPECT_EQ(watch.rows().size(), rows);
    EXPECT_EQ(first_bad(RangeReport(watch.rows())), "");
  }
}

}  // namespace
}  // namespace headroom::libtorch
