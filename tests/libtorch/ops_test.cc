// 16-bit products with FP32 accumulation, compared with FP64.
#include <cmath>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

class Ops : public testing::TestWithParam<torch::ScalarType> {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  torch::Tensor random(torch::IntArrayRef sizes) {
    return torch::randn(sizes).to(GetParam()).requires_grad_(true);
  }

  // Allows half a unit in the last place, the rounding of FP32 sums, and half an FP16 subnormal.
  void expect_close(const torch::Tensor& got, const torch::Tensor& want) {
    ASSERT_EQ(got.scalar_type(), GetParam());
    ASSERT_EQ(got.sizes(), want.sizes());
    const double unit = GetParam() == torch::kHalf ? 0x1p-11 : 0x1p-8;
    const torch::Tensor error = (got.to(torch::kDouble) - want).abs();
    const torch::Tensor allowed = want.abs() * unit + 2e-6 * value(want.abs().max()) + 0x1p-25;
    EXPECT_TRUE((error <= allowed).all().item<bool>()) << value((error / allowed).max());
  }

  using Product = std::function<torch::Tensor(const std::vector<torch::Tensor>&)>;

  // Forward and backward of `ours` in 16 bits against `reference` in FP64.
  void compare(std::vector<torch::Tensor> inputs, const Product& ours, const Product& reference) {
    std::vector<torch::Tensor> wide;
    for (const torch::Tensor& input : inputs) {
      wide.push_back(input.detach().to(torch::kDouble).requires_grad_(true));
    }
    const torch::Tensor got = ours(inputs);
    const torch::Tensor want = reference(wide);
    expect_close(got, want.detach());
    const torch::Tensor grad = torch::randn(got.sizes()).to(GetParam());
    got.backward(grad);
    want.backward(grad.to(torch::kDouble));
    for (size_t i = 0; i < inputs.size(); ++i) expect_close(inputs[i].grad(), wide[i].grad());
  }
};

INSTANTIATE_TEST_SUITE_P(Types, Ops, testing::Values(torch::kHalf, torch::kBFloat16),
                         [](const auto& type) { return std::string(torch::toString(type.param)); });

TEST_P(Ops, LinearMatchesFp64) {
  compare(
      {random({5, 33, 70}), random({19, 70}), random({19})},
      [](const auto& in) { return libtorch::linear(in[0], in[1], in[2]); },
      [](const auto& in) { return torch::linear(in[0], in[1], in[2]); });
  compare(
      {random({8, 70}), random({19, 70})},
      [](const auto& in) { return libtorch::linear(in[0], in[1]); },
      [](const auto& in) { return torch::linear(in[0], in[1]); });
}

TEST_P(Ops, MatmulMatchesFp64) {
  for (const auto& [a, b] : std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>{
           {{7, 70}, {70, 9}}, {{2, 3, 7, 33}, {2, 3, 33, 5}}, {{4, 7, 33}, {33, 5}}}) {
    compare(
        {random(a), random(b)}, [](const auto& in) { return libtorch::matmul(in[0], in[1]); },
        [](const auto& in) { return torch::matmul(in[0], in[1]); });
  }
}

TEST_P(Ops, Conv2dMatchesFp64) {
  for (const int64_t stride : {1, 2}) {
    for (const int64_t groups : {1, 2}) {
      compare(
          {random({2, 4, 9, 8}), random({6, 4 / groups, 3, 3}), random({6})},
          [&](const auto& in) {
            return libtorch::conv2d(in[0], in[1], in[2], stride, 1, 1, groups);
          },
          [&](const auto& in) { return torch::conv2d(in[0], in[1], in[2], stride, 1, 1, groups); });
    }
  }
}

TEST_P(Ops, TransposedInputsAreAccepted) {
  compare(
      {random({70, 9}), random({19, 70})},
      [](const auto& in) { return libtorch::linear(in[0].t(), in[1]); },
      [](const auto& in) { return torch::linear(in[0].t(), in[1]); });
}

TEST_P(Ops, SumsAreComputedInFp32) {
  // The sum of 4096 ones: an FP16 accumulator would stop at 2048 and a BF16 one at 256.
  const torch::Tensor ones = torch::ones({1, 4096}, GetParam());
  EXPECT_EQ(value(libtorch::linear(ones, ones)), 4096.0);
}

TEST_P(Ops, SecondDerivativesWork) {
  // y = x^2 through a product; dy/dx = 2x; d(dy/dx)^2/dx = 8x.
  torch::Tensor x = torch::full({1, 1}, 3.0).to(GetParam()).requires_grad_(true);
  const torch::Tensor y = cast(libtorch::matmul(x, x), torch::kFloat).sum();
  const torch::Tensor grad = torch::autograd::grad({y}, {x}, {}, true, true)[0];
  EXPECT_EQ(value(grad), 6.0);
  cast(grad, torch::kFloat).pow(2).sum().backward();
  EXPECT_EQ(value(x.grad()), 24.0);
}

TEST(OpsUnderAutocast, ComplexIntegerAndDoubleProductsKeepTheirType) {
  const Autocast amp(torch::kCPU, torch::kHalf);
  const torch::Tensor z = torch::full({1, 1}, c10::complex<float>(1.0f, 2.0f));
  EXPECT_TRUE(
      torch::equal(libtorch::matmul(z, z), torch::full({1, 1}, c10::complex<float>(-3.0f, 4.0f))));
  const torch::Tensor n = torch::full({1, 1}, 3001, torch::kLong);
  EXPECT_EQ(libtorch::matmul(n, n).item<int64_t>(), 3001 * 3001);
  const torch::Tensor d = torch::full({1, 1}, 1.0 + 0x1p-40, torch::kDouble);
  EXPECT_EQ(libtorch::matmul(d, d).scalar_type(), torch::kDouble);
}

TEST(Cast, MatchesTorchAndPropagatesGradients) {
  const torch::Tensor values =
      torch::tensor({0.0f, -0.0f, 1.0f, -2.5f, 65504.0f, 65520.0f, 0x1p-24f, 0x1p-25f,
                     1.5f * 0x1p-24f, 1e-40f, std::numeric_limits<float>::infinity()});
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    torch::Tensor x = values.clone().requires_grad_(true);
    const torch::Tensor narrow = cast(x, dtype);
    EXPECT_TRUE(same_bits(narrow, values.to(dtype)));
    narrow.backward(torch::ones_like(narrow));
    EXPECT_TRUE(torch::equal(x.grad(), torch::ones_like(values)));
    EXPECT_TRUE(
        torch::equal(cast(narrow.detach(), torch::kFloat), values.to(dtype).to(torch::kFloat)));
  }
  EXPECT_TRUE(cast(values, torch::kFloat).is_same(values));
  EXPECT_EQ(cast(values.to(torch::kDouble), torch::kHalf).scalar_type(), torch::kHalf);
}

TEST(Cast, KeepsDenseStridesAndAcceptsOthers) {
  const torch::Tensor image =
      torch::randn({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
  const torch::Tensor narrow = cast(image, torch::kHalf);
  EXPECT_EQ(narrow.strides(), image.strides());
  EXPECT_TRUE(torch::equal(narrow, image.to(torch::kHalf)));
  const torch::Tensor slice = torch::randn({6, 8}).slice(1, 1, 8, 3);
  EXPECT_TRUE(torch::equal(cast(slice, torch::kHalf), slice.to(torch::kHalf)));
  EXPECT_EQ(cast(torch::empty({0, 3}), torch::kHalf).sizes(), torch::IntArrayRef({0, 3}));
  EXPECT_EQ(value(cast(torch::tensor(3.0f), torch::kHalf)), 3.0);
}

TEST(CastMeter, CountsGradientValuesThatBecomeZero) {
  torch::Tensor x = torch::ones({4}).to(torch::kHalf).requires_grad_(true);
  const auto run_backward = [&] {
    cast(x, torch::kFloat).backward(torch::tensor({1.0f, 1e-9f, 0.0f, -1e-10f}));
  };
  run_backward();
  {
    const CastMeter meter;
    expect_error(ErrorCode::kWrongOrder, "already a CastMeter", [] { CastMeter second; });
    run_backward();
    EXPECT_EQ(meter.loss().values, 3);
    EXPECT_EQ(meter.loss().zeroed, 2);
  }
  const CastMeter meter;
  EXPECT_EQ(meter.loss().values, 0);
}

}  // namespace
}  // namespace headroom::libtorch
