// cast(), linear(), matmul() and conv2d() in 16 bits with FP32 sums, and CastMeter.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <headroom/error.h>
#include <headroom/libtorch/autocast.h>
#include <headroom/libtorch/ops.h>
#include <headroom/measure.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

#include <atomic>

#include "tensors.h"

namespace headroom::libtorch {
namespace {

using torch::Tensor;

// Counters of the CastMeter. Atomic, because backward may run in any thread.
std::atomic<bool> metering{false};
std::atomic<int64_t> metered_values{0};
std::atomic<int64_t> metered_zeroed{0};

using internal::is_sixteen_bit;

// Whether the core's conversion can be used: FP16, BF16 and FP32 on the CPU.
bool core_converts(const Tensor& tensor, torch::ScalarType dtype) {
  const auto ours = [](torch::ScalarType type) {
    return is_sixteen_bit(type) || type == torch::kFloat;
  };
  return tensor.is_cpu() && tensor.layout() == torch::kStrided && ours(tensor.scalar_type()) &&
         ours(dtype);
}

// Keeps the strides of dense tensors; others become contiguous.
Tensor converted(const Tensor& tensor, torch::ScalarType dtype) {
  const Tensor from = internal::is_dense(tensor) ? tensor : tensor.contiguous();
  const Tensor to = torch::empty_like(from, from.options().dtype(dtype));
  if (from.numel() > 0) convert(view_of(from, "A"), view_of(to, "A"));
  return to;
}

// Adds to the CastMeter's counters.
void count_loss(const Tensor& before, const Tensor& after) {
  const auto zeros = [](const Tensor& tensor) {
    if (tensor.numel() == 0) return int64_t{0};
    const Tensor dense = internal::is_dense(tensor) ? tensor : tensor.contiguous();
    GradDetail detail;
    measure({view_of(dense, "A")}, &detail);
    return detail.zeros;
  };
  const int64_t zeros_before = zeros(before);
  metered_values += before.numel() - zeros_before;
  metered_zeroed += zeros(after) - zeros_before;
}

// The conversion as an autograd function: backward casts the gradient to the input's type.
struct Cast : torch::autograd::Function<Cast> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& tensor,
                        int64_t dtype) {
    context->saved_data["from"] = static_cast<int64_t>(tensor.scalar_type());
    return converted(tensor, static_cast<torch::ScalarType>(dtype));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto from = static_cast<torch::ScalarType>(context->saved_data["from"].toInt());
    const Tensor grad = cast(grads[0], from);
    if (metering && is_sixteen_bit(from)) count_loss(grads[0], grad);
    return {grad, Tensor()};
  }
};

// Autocast leaves FP64, integers and complex numbers alone.
bool is_castable(const Tensor& tensor) {
  return !tensor.defined() ||
         (tensor.is_floating_point() && tensor.scalar_type() != torch::kDouble);
}

// The type in which a product with these operands runs: the autocast type, or that of `input`.
torch::ScalarType compute_type(const Tensor& input, const Tensor& other, const Tensor& bias) {
  const torch::ScalarType active = Autocast::active(input.device());
  const bool castable = is_castable(input) && is_castable(other) && is_castable(bias);
  if (!castable) return torch::kDouble;  // not a 16-bit type: torch computes it
  return is_sixteen_bit(active) ? active : input.scalar_type();
}

// op(input, other, bias) in the type that autocast asks for. Where this LibTorch has no 16-bit op,
// or `emulate_half` says that its FP16 op on the CPU is not good enough, the operands are rounded
// to that type, widened and multiplied in FP32 with autocast off, and the result is rounded.
template <typename Op>
Tensor product(const Tensor& input, const Tensor& other, const Tensor& bias, bool emulate_half,
               const Op& op) {
  const torch::ScalarType type = compute_type(input, other, bias);
  const bool emulate =
      (!kNativeHalfOnCpu && is_sixteen_bit(type)) || (emulate_half && type == torch::kHalf);
  if (!input.is_cpu() || !emulate) return op(input, other, bias);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const auto rounded = [type](const Tensor& tensor) {
    return tensor.defined() ? cast(cast(tensor, type), torch::kFloat) : tensor;
  };
  return cast(op(rounded(input), rounded(other), rounded(bias)), type);
}

}  // namespace

// Torch converts what the core does not: CUDA, FP64, sparse and integer tensors.
Tensor cast(const Tensor& tensor, torch::ScalarType dtype) {
  if (tensor.scalar_type() == dtype) return tensor;
  if (!core_converts(tensor, dtype)) return tensor.to(dtype);
  return Cast::apply(tensor, static_cast<int64_t>(dtype));
}

Tensor linear(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  return product(input, weight, bias, false, [](const Tensor& x, const Tensor& w, const Tensor& b) {
    return torch::linear(x, w, b);
  });
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  return product(a, b, {}, false, [](const Tensor& x, const Tensor& y, const Tensor&) {
    return torch::matmul(x, y);
  });
}

// LibTorch 2.3 and later convolve FP16 on the CPU, but accumulate in FP16.
Tensor conv2d(const Tensor& input, const Tensor& weight, const Tensor& bias,
              torch::IntArrayRef stride, torch::IntArrayRef padding, torch::IntArrayRef dilation,
              int64_t groups) {
  return product(input, weight, bias, true, [&](const Tensor& x, const Tensor& w, const Tensor& b) {
    return torch::conv2d(x, w, b, stride, padding, dilation, groups);
  });
}

CastMeter::CastMeter() {
  if (metering.exchange(true)) {
    throw Error(ErrorCode::kWrongOrder,
                "There is already a CastMeter; only one may exist at a time.");
  }
  metered_values = 0;
  metered_zeroed = 0;
}

CastMeter::~CastMeter() { metering = false; }

CastLoss CastMeter::loss() const { return {metered_values, metered_zeroed}; }

}  // namespace headroom::libtorch
