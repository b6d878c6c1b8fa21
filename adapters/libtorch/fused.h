// What is inside a FusedOptimizer: the core's optimizer, kept in step with torch's groups.
#ifndef HEADROOM_ADAPTERS_LIBTORCH_FUSED_H_
#define HEADROOM_ADAPTERS_LIBTORCH_FUSED_H_

#include <headroom/libtorch/optim.h>

#include "binding.h"

namespace headroom::libtorch::internal {

class FusedBody : public Binding {
 public:
  headroom::Optimizer& bind(torch::optim::Optimizer& optimizer, const Names& names) override;
  void refresh() override;
  void release() override;

  /// The same without gradients: the core sees the weights as they are.
  void follow();
  void weights_written() override;

  virtual headroom::FusedOptimizer& core() = 0;

  /// The core's state as torch tensors, and back. After bind() and release().
  FusedState state();
  void load_state(const FusedState& state);

  /// Writes and reads torch's own format, and beside it what torch does not keep: masters.
  virtual void save(const torch::optim::Optimizer& optimizer,
                    torch::serialize::OutputArchive& archive) = 0;
  virtual void load(torch::optim::Optimizer& optimizer,
                    torch::serialize::InputArchive& archive) = 0;

 protected:
  /// Gives the core the options of all groups, and adds groups that are new.
  virtual void sync_groups(torch::optim::Optimizer& optimizer) = 0;

  /// The parameters of a new group, without gradients yet.
  std::vector<Parameter> new_parameters(const std::vector<torch::Tensor>& params);

  /// Masters agree with the weights as they are now.
  void masters_are_right();

  std::vector<torch::Tensor> tensors_;  // the parameters, as in core().parameters()

 private:
  void check_same(const torch::optim::Optimizer& optimizer) const;
  std::vector<Parameter> memory(bool with_gradients);
  void show(bool with_gradients);
  void reorder();

  struct Layout {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };
  std::vector<Layout> layouts_;     // of tensors_: the order of the core's memory
  std::vector<c10::Storage> held_;  // of tensors_, as they were last shown

  std::vector<int64_t> versions_;  // of tensors_ when their masters were last right
};

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_FUSED_H_
