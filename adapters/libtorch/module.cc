// ModuleGradients: the gradients of a torch module as views for the core.
#include <headroom/libtorch/module.h>

#include "tensors.h"

namespace headroom::libtorch {

// `stream` is in effect as long as the object lives, as its header promises.
struct ModuleGradients::Impl {
  internal::TorchStream stream;
  internal::Gradients gradients;
  std::vector<Parameter> parameters;
};

ModuleGradients::ModuleGradients(const torch::nn::Module& module)
    : impl_(std::make_unique<Impl>()) {
  for (const auto& item : module.named_parameters()) {
    const size_t index = impl_->parameters.size();
    impl_->gradients.update(index, item.value(), internal::Gradients::Order::kAny, item.key());
    impl_->parameters.push_back({item.key(), {}, impl_->gradients.view(index)});
  }
}

ModuleGradients::~ModuleGradients() = default;

const std::vector<Parameter>& ModuleGradients::parameters() const { return impl_->parameters; }

void ModuleGradients::write_back() { impl_->gradients.write_back(); }

}  // namespace headroom::libtorch
