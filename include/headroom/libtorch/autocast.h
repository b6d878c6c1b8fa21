// torch.autocast for C++: which precision LibTorch's ops use in a scope.
#ifndef HEADROOM_LIBTORCH_AUTOCAST_H_
#define HEADROOM_LIBTORCH_AUTOCAST_H_

#include <headroom/export.h>
#include <torch/types.h>

namespace headroom::libtorch {

/// torch.autocast as a C++ scope: inside it, LibTorch chooses the precision of each op.
///
///     { Autocast amp(torch::kCUDA, torch::kHalf);
///       loss = criterion(model->forward(x), y); }
///     scaler.scale(loss).backward();               // call backward outside
///
/// Scopes nest; a disabled one turns autocast off inside another. The destructor restores the
/// previous flags. Like LibTorch's own flags, a scope affects the thread that created it, and must
/// be destroyed in that thread.
///
/// LibTorch before 2.3 has no FP16 ops on the CPU. There an FP16 scope affects the functions of
/// headroom/libtorch/ops.h only, and all other ops run in FP32.
class HEADROOM_API Autocast {
 public:
  /// FP16 on CUDA, BF16 elsewhere, as in PyTorch.
  explicit Autocast(torch::Device device);

  /// `cache` keeps the 16-bit copies of weights until the outermost scope ends. Throws
  /// Error(kInvalidArgument) unless `dtype` is torch::kHalf or torch::kBFloat16, and
  /// Error(kUnsupported) unless the device is the CPU or CUDA.
  Autocast(torch::Device device, torch::ScalarType dtype, bool enabled = true, bool cache = true);

  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// The type of matrix products in this thread on this kind of device: that of the innermost
  /// scope, or torch::kFloat outside of all.
  static torch::ScalarType active(torch::Device device);

 private:
  torch::DeviceType device_;
  bool enabled_before_;
  bool cache_before_;
  torch::ScalarType dtype_before_;
  torch::ScalarType emulated_before_;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_AUTOCAST_H_
