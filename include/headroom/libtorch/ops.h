// Matrix products that take 16-bit tensors in and give them out and add up in FP32, as a Tensor
// Core does, on every LibTorch. Where LibTorch has such ops (CUDA, and the CPU from 2.3 on, FP16
// convolutions excepted) these are its own; elsewhere they round with Headroom's conversions and
// multiply in FP32. Forward, backward and double backward round every tensor to 16 bits where a
// 16-bit kernel would store it.
#ifndef HEADROOM_LIBTORCH_OPS_H_
#define HEADROOM_LIBTORCH_OPS_H_

#include <headroom/export.h>
#include <torch/types.h>
#include <torch/version.h>

#include <cstdint>

namespace headroom::libtorch {

/// Whether LibTorch itself has FP16 ops on the CPU.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
inline constexpr bool kNativeHalfOnCpu = true;
#else
inline constexpr bool kNativeHalfOnCpu = false;
#endif

/// The tensor in another floating-point type: to nearest even, subnormals and NaN kept, by
/// Headroom's conversions on the CPU. The gradient is cast back. Strides are kept where they are
/// dense.
HEADROOM_API torch::Tensor cast(const torch::Tensor& tensor, torch::ScalarType dtype);

/// torch::linear, torch::matmul and torch::conv2d. They run in the type of the innermost Autocast,
/// or outside of any in the type of their input.
HEADROOM_API torch::Tensor linear(const torch::Tensor& input, const torch::Tensor& weight,
                                  const torch::Tensor& bias = {});
HEADROOM_API torch::Tensor matmul(const torch::Tensor& a, const torch::Tensor& b);
HEADROOM_API torch::Tensor conv2d(const torch::Tensor& input, const torch::Tensor& weight,
                                  const torch::Tensor& bias = {}, torch::IntArrayRef stride = 1,
                                  torch::IntArrayRef padding = 0, torch::IntArrayRef dilation = 1,
                                  int64_t groups = 1);

/// What rounding to 16 bits did to gradients on their way back.
struct CastLoss {
  int64_t values = 0;  // gradient values that were not zero
  int64_t zeroed = 0;  // of which became zero
};

/// Counts, as long as it lives, what cast() and the products above lose of gradients. One may live
/// at a time, in whichever thread: it sees those of all. It makes backward slower, and sees nothing
/// where LibTorch's own ops are used.
class HEADROOM_API CastMeter {
 public:
  CastMeter();
  ~CastMeter();
  CastMeter(const CastMeter&) = delete;
  CastMeter& operator=(const CastMeter&) = delete;

  CastLoss loss() const;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_OPS_H_
