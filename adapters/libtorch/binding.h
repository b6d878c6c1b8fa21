// Bindings present torch optimizers to the core as headroom::Optimizer. An optimizer is bound once;
// before each use the core calls refresh(), which updates the views of tensors that torch has
// moved.
#ifndef HEADROOM_ADAPTERS_LIBTORCH_BINDING_H_
#define HEADROOM_ADAPTERS_LIBTORCH_BINDING_H_

#include <headroom/optimizer.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensors.h"

namespace headroom::libtorch::internal {

/// A reference to a parameter that does not keep its data alive. It does keep the TensorImpl
/// allocated, so equal id()s always mean the same tensor: no new one can have the same address.
class WeakTensor {
 public:
  explicit WeakTensor(const torch::Tensor& tensor) : impl_(tensor.getIntrusivePtr()) {}
  torch::Tensor lock() const;  // undefined if the tensor no longer exists
  const c10::TensorImpl* id() const { return impl_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
};

/// Names of parameters for reports.
class Names {
 public:
  void add(const torch::nn::Module& module);

  /// The name in a module passed to add(), or "param_groups[0].params[2] of size [4, 4]".
  std::string of(const torch::Tensor& parameter, size_t group, size_t index) const;
  int64_t revision() const { return revision_; }

 private:
  std::unordered_map<const c10::TensorImpl*, std::pair<WeakTensor, std::string>> names_;
  int64_t revision_ = 0;
};

class Binding {
 public:
  virtual ~Binding() = default;

  /// The optimizer that the core steps.
  virtual headroom::Optimizer& core() = 0;

  /// Reads the present parameters, names and options of `optimizer`. The core may use core() until
  /// release(). Throws Error(kInvalidArgument) if a parameter is listed twice.
  virtual void bind(torch::optim::Optimizer& optimizer, const Names& names) = 0;

  /// Call this after the core has written to weights.
  virtual void weights_written() {}

  /// Drops the references to gradients, so that torch can free them.
  virtual void release() { gradients_.release(); }

  /// Drops all views of gradients, because another optimizer uses them now.
  virtual void forget_gradients() = 0;

  /// Whether a parameter is in both.
  bool shares_parameter(const Binding& other) const;

 protected:
  /// Sets weak_ and names_ from the optimizer's groups, if they have changed.
  void list(torch::optim::Optimizer& optimizer, const Names& names);

  std::vector<WeakTensor> weak_;  // the parameters of all groups
  std::vector<std::string> names_;
  Gradients gradients_;
  bool settled_ = false;  // the core has the views of gradients_; not after an exception

 private:
  int64_t names_revision_ = -1;
  std::vector<const c10::TensorImpl*> sorted_;  // the parameters by address
};

/// Any torch::optim optimizer. Gradients are unscaled in place, then its own step() runs.
class PlainBinding : public Binding, private headroom::Optimizer {
 public:
  PlainBinding() : headroom::Optimizer({}) {}

  headroom::Optimizer& core() override { return *this; }
  void bind(torch::optim::Optimizer& optimizer, const Names& names) override;
  void release() override;
  void forget_gradients() override;

 private:
  void refresh() override;
  void gradients_changed() override { gradients_.write_back(); }
  void apply(float multiplier, bool clear_grads) override;
  bool overflows(float multiplier) const override;

  torch::optim::Optimizer* torch_ = nullptr;  // valid between bind() and release()
};

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_BINDING_H_
