// How a torch optimizer looks to the core: a list of parameters. It is bound once; before each use
// the core calls refresh(), which binds again only what torch has moved.
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

/// A parameter that is not kept alive.
class WeakTensor {
 public:
  explicit WeakTensor(const torch::Tensor& tensor) : impl_(tensor.getIntrusivePtr()) {}
  torch::Tensor lock() const;  // undefined if it is gone
  const c10::TensorImpl* id() const { return impl_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
};

/// What reports call a parameter.
class Names {
 public:
  void add(const torch::nn::Module& module);
  std::string of(const torch::Tensor& parameter, size_t group, size_t index) const;
  int64_t revision() const { return revision_; }

 private:
  std::unordered_map<const c10::TensorImpl*, std::pair<WeakTensor, std::string>> names_;
  int64_t revision_ = 0;
};

class Binding {
 public:
  virtual ~Binding() = default;

  /// What the core works on.
  virtual headroom::Optimizer& core() = 0;

  /// Takes over parameters, names and options as the optimizer has them now. Until release() the
  /// core may step it.
  virtual void bind(torch::optim::Optimizer& optimizer, const Names& names) = 0;

  /// The core has written to weights.
  virtual void weights_written() {}

  /// Lets go of all gradients, so that torch can free them.
  virtual void release() { gradients_.release(); }

  /// Forgets where gradients are: another optimizer uses them now.
  virtual void forget_gradients() = 0;

  /// True if a living parameter is in both.
  bool shares_parameter(const Binding& other) const;

 protected:
  /// Makes weak_ and names_ those of the optimizer's groups, if they are others.
  void list(torch::optim::Optimizer& optimizer, const Names& names);

  std::vector<WeakTensor> weak_;  // of all groups in their order
  std::vector<std::string> names_;
  Gradients gradients_;

 private:
  int64_t names_revision_ = -1;
  std::vector<const c10::TensorImpl*> sorted_;
};

/// Any torch::optim optimizer: gradients are unscaled in place, then its own step() runs.
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
