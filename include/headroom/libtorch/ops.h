// Matrix products with 16-bit inputs and outputs and FP32 sums, like those of Tensor Cores, on
// every LibTorch. Where LibTorch has such ops (CUDA, and the CPU since 2.3 except FP16
// convolutions) they are used; elsewhere Headroom's conversions round and FP32 ops multiply.
// Forward, backward and double backward round every tensor to 16 bits where a 16-bit kernel would
// store it.
#ifndef HEADROOM_LIBTORCH_OPS_H_
#define HEADROOM_LIBTORCH_OPS_H_

#include <headroom/export.h>
#include <torch/types.h>
#include <torch/version.h>

#include <cstdint>

namespace headroom::libtorch {

/// Whether LibTorch has FP16 ops on the CPU.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
inline constexpr bool kNativeHalfOnCpu = true;
#else
inline constexpr bool kNativeHalfOnCpu = false;
#endif

/// Converts to another floating-point type. On the CPU Headroom's conversions are used: they round
/// to nearest even and keep subnormals and NaN. Backward casts the gradient back. Keeps the strides
/// of dense tensors.
HEADROOM_API torch::Tensor cast(const torch::Tensor& tensor, torch::ScalarType dtype);

/// torch::linear, torch::matmul and torch::conv2d in the type of the innermost Autocast or, outside
/// of all, of their input.
HEADROOM_API torch::Tensor linear(const torch::Tensor& input, const torch::Tensor& weight,
                                  const torch::Tensor& bias = {});
HEADROOM_API torch::Tensor matmul(const torch::Tensor& a, const torch::Tensor& b);
HEADROOM_API torch::Tensor conv2d(const torch::Tensor& input, const torch::Tensor& weight,
                                  const torch::Tensor& bias = {}, torch::IntArrayRef stride = 1,
                                  torch::IntArrayRef padding = 0, torch::IntArrayRef dilation = 1,
                                  int64_t groups = 1);

/// Gradient values that underflowed in 16 bits during backward.
struct CastLoss {
  int64_t values = 0;  // nonzero values before rounding
  int64_t zeroed = 0;  // of which rounded to zero
};

/// Counts gradient values that cast() and the products above round to zero, in all threads, during
/// its lifetime. Slows down backward. LibTorch's own ops are not counted. The constructor throws
/// Error(kWrongOrder) if another one exists.
class HEADROOM_API CastMeter {
 public:
  CastMeter();
  ~CastMeter();
  CastMeter(const CastMeter&) = delete;
  CastMeter& operator=(const CastMeter&) = delete;

  /// Counts since the meter was made.
  CastLoss loss() const;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_OPS_H_
