// Tensors of LibTorch as the core's functions take them: measure(), measure_layers(), Injector, and
// so on.
#ifndef HEADROOM_LIBTORCH_MODULE_H_
#define HEADROOM_LIBTORCH_MODULE_H_

#include <headroom/export.h>
#include <headroom/runtime.h>
#include <headroom/tensor.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

namespace headroom::libtorch {

/// A view of a dense tensor of half, bfloat16, float, double or a complex type, on the CPU or on
/// CUDA. Throws Error(kUnsupported) for others; `name` begins the sentence.
HEADROOM_API TensorView view_of(const torch::Tensor& tensor, const std::string& name);

/// The gradients of a module's parameters as they are now, by name:
///
///     ModuleGradients gradients(*model);
///     GradStats stats = measure(gradients.parameters());
///
/// They are held, and work on CUDA tensors goes to LibTorch's current streams, as long as it lives.
class HEADROOM_API ModuleGradients {
 public:
  explicit ModuleGradients(const torch::nn::Module& module);
  ~ModuleGradients();
  ModuleGradients(const ModuleGradients&) = delete;
  ModuleGradients& operator=(const ModuleGradients&) = delete;

  /// With default-made weights.
  const std::vector<Parameter>& parameters() const;

  /// To be called after gradients were changed through parameters().
  void write_back();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_MODULE_H_
