// Autocast scopes.
#include <stdexcept>
#include <thread>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

torch::ScalarType active_dtype() { return Autocast::active(torch::kCPU); }

torch::ScalarType product_dtype() {
  return libtorch::matmul(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

TEST(Autocast, ProductsRunInTheDtypeOfTheScope) {
  EXPECT_EQ(product_dtype(), torch::kFloat);
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const Autocast scope(torch::kCPU, dtype);
    EXPECT_EQ(active_dtype(), dtype);
    EXPECT_EQ(product_dtype(), dtype);
  }
  EXPECT_EQ(product_dtype(), torch::kFloat);
}

TEST(Autocast, AppliesToLibTorchsOwnOps) {
  const torch::Tensor x = torch::ones({2, 2});
  {
    const Autocast scope(torch::kCPU, torch::kBFloat16);
    EXPECT_EQ(torch::mm(x, x).scalar_type(), torch::kBFloat16);
    EXPECT_EQ(torch::mse_loss(x, x).scalar_type(), torch::kFloat);
  }
  if (kNativeHalfOnCpu) {
    const Autocast scope(torch::kCPU, torch::kHalf);
    EXPECT_EQ(torch::mm(x, x).scalar_type(), torch::kHalf);
  }
  EXPECT_EQ(torch::mm(x, x).scalar_type(), torch::kFloat);
}

TEST(Autocast, DefaultsMatchPyTorch) {
  const Autocast scope(torch::kCPU);
  EXPECT_EQ(active_dtype(), torch::kBFloat16);
  EXPECT_EQ(Autocast::active(torch::kCUDA), torch::kFloat) << "each device type has its own dtype";
  const Autocast cuda(torch::kCUDA);
  EXPECT_EQ(Autocast::active(torch::kCUDA), torch::kHalf);
}

TEST(Autocast, ScopesNest) {
  const Autocast outer(torch::kCPU, torch::kBFloat16);
  {
    const Autocast inner(torch::kCPU, torch::kHalf);
    EXPECT_EQ(product_dtype(), torch::kHalf);
    {
      const Autocast off(torch::kCPU, torch::kHalf, false);
      EXPECT_EQ(active_dtype(), torch::kFloat);
      EXPECT_EQ(product_dtype(), torch::kFloat);
      EXPECT_EQ(torch::mm(torch::ones({1, 1}), torch::ones({1, 1})).scalar_type(), torch::kFloat);
    }
    EXPECT_EQ(product_dtype(), torch::kHalf);
  }
  EXPECT_EQ(product_dtype(), torch::kBFloat16);
}

TEST(Autocast, ExceptionRestoresThePreviousDtype) {
  try {
    const Autocast scope(torch::kCPU, torch::kHalf);
    throw std::runtime_error("inside the scope");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(active_dtype(), torch::kFloat);
  EXPECT_EQ(product_dtype(), torch::kFloat);
}

TEST(Autocast, IsPerThread) {
  const Autocast scope(torch::kCPU, torch::kHalf);
  std::thread([] { EXPECT_EQ(active_dtype(), torch::kFloat); }).join();
}

TEST(Autocast, RejectsUnsupportedDtypesAndDevices) {
  expect_error(ErrorCode::kInvalidArgument, "Float",
               [] { Autocast scope(torch::kCPU, torch::kFloat); });
  expect_error(ErrorCode::kUnsupported, "meta", [] { Autocast scope(torch::kMeta, torch::kHalf); });
  EXPECT_EQ(active_dtype(), torch::kFloat);
}

TEST(Autocast, WeightGradientsAreFp32) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    torch::Tensor weight = torch::ones({3, 2}).requires_grad_(true);
    torch::Tensor out;
    {
      const Autocast scope(torch::kCPU, dtype);
      out = libtorch::linear(torch::ones({4, 2}), weight);
    }
    cast(out, torch::kFloat).sum().backward();
    EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat);
    EXPECT_EQ(value(weight.grad()[0][0]), 4.0);
  }
}

}  // namespace
}  // namespace headroom::libtorch
