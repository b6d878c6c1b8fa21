#ifndef HEADROOM_LIBTORCH_AUTOCAST_H_
#define HEADROOM_LIBTORCH_AUTOCAST_H_

#include <headroom/export.h>
#include <torch/types.h>

namespace headroom::libtorch {

/// torch.autocast as a C++ scope: inside, each op runs in its best precision.
///
///     { Autocast amp(torch::kCUDA, torch::kHalf);
///       loss = criterion(model->forward(x), y); }
///     scaler.scale(loss).backward();               // backward belongs outside
///
/// Scopes nest, a disabled one switches autocast off inside another, and leaving one, by an
/// exception too, restores what was there. Like LibTorch's own flags it concerns the thread that
/// made it, and has to be destroyed in that thread.
///
/// LibTorch before 2.3 has no FP16 ops on the CPU. There a scope of FP16 works for the functions of
/// headroom/libtorch/ops.h, and everything else stays in FP32.
class HEADROOM_API Autocast {
 public:
  /// FP16 on CUDA, BF16 elsewhere, as in PyTorch.
  explicit Autocast(torch::Device device);

  /// `dtype` is torch::kHalf or torch::kBFloat16; anything else throws Error(kInvalidArgument).
  /// `cache` keeps the 16-bit copies of weights until the outermost scope ends.
  Autocast(torch::Device device, torch::ScalarType dtype, bool enabled = true, bool cache = true);

  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// The type that matrix products have now, in this thread, on this kind of device: the innermost
  /// scope's, or torch::kFloat outside of any.
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
