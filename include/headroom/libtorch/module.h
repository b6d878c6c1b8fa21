// LibTorch tensors for the core's functions: measure(), measure_layers(), Injector and others.
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
/// CUDA. It does not own the memory. Throws Error(kUnsupported) for other tensors; the message
/// begins with `name`.
HEADROOM_API TensorView view_of(const torch::Tensor& tensor, const std::string& name);

/// The present gradients of a module's parameters, with their names:
///
///     ModuleGradients gradients(*model);
///     GradStats stats = measure(gradients.parameters());
///
/// During its lifetime the gradients are kept alive and the core's CUDA work goes to LibTorch's
/// current streams.
class HEADROOM_API ModuleGradients {
 public:
  /// Keeps references to the module's parameters and their names.
  explicit ModuleGradients(const torch::nn::Module& module);
  ~ModuleGradients();
  ModuleGradients(const ModuleGradients&) = delete;
  ModuleGradients& operator=(const ModuleGradients&) = delete;

  /// The weights are empty views.
  const std::vector<Parameter>& parameters() const;

  /// Call this after changing gradients through parameters().
  void write_back();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_MODULE_H_
