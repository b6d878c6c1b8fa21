// What is inside a FusedOptimizer: the core's optimizer, kept in step with torch's groups.
#ifndef HEADROOM_ADAPTERS_LIBTORCH_FUSED_H_
#define HEADROOM_ADAPTERS_LIBTORCH_FUSED_H_

#include <headroom/libtorch/optim.h>

#include "binding.h"

namespace headroom::libtorch::internal {

class FusedBody : public Binding {
 public:
  virtual headroom::FusedOptimizer& fused() = 0;
  headroom::Optimizer& core() override { return fused(); }

  void bind(torch::optim::Optimizer& optimizer, const Names& names) override;
  void forget_gradients() override;
  void weights_written() override;

  /// Shows the core where weights and, if asked for, gradients are now; masters follow weights that
  /// somebody has written to. Called by the core before it uses the parameters.
  void refresh(bool with_gradients);
  void gradients_changed() { gradients_.write_back(); }

  /// The core's state as torch tensors, and back. After bind() and refresh().
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

  std::vector<torch::Tensor> tensors_;  // the parameters, as in fused().parameters()

 private:
  // How a weight was when it was last shown to the core.
  struct Shown {
    Place place;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    c10::Storage held;    // as long as it is held, no other weight can come to its address unseen
    int64_t version = 0;  // when its master was last right
  };

  void check_same(const torch::optim::Optimizer& optimizer) const;
  bool weights_moved();
  void reorder();
  void masters_are_right();

  std::vector<Shown> shown_;  // of tensors_
};

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_FUSED_H_
