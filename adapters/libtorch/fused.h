// The implementation of FusedOptimizer: the core's optimizer, synchronized with torch's parameter
// groups and tensors.
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

  /// Updates the core's views of weights and, if asked for, of gradients. The master of a weight
  /// that others have written to is updated from the weight. The core calls this before it uses the
  /// parameters. Throws Error(kMismatch) if a weight has changed its shape.
  void refresh(bool with_gradients);
  void gradients_changed() { gradients_.write_back(); }

  /// The core's state as torch tensors over the core's memory, and back. Call these after bind()
  /// and refresh(). A parameter has no tensors before the first step. load_state() throws
  /// Error(kBadState), changing nothing, if the state does not fit.
  FusedState state();
  void load_state(const FusedState& state);

  /// Writes and reads torch's own format, plus what torch does not store: masters and step counts.
  virtual void save(const torch::optim::Optimizer& optimizer,
                    torch::serialize::OutputArchive& archive) = 0;
  virtual void load(torch::optim::Optimizer& optimizer,
                    torch::serialize::InputArchive& archive) = 0;

 protected:
  /// Copies the options of all groups to the core, and adds new groups.
  virtual void sync_groups(torch::optim::Optimizer& optimizer) = 0;

  /// The parameters of a new group, without gradients. Throws Error(kUnsupported) for weights that
  /// are complex or not dense.
  std::vector<Parameter> new_parameters(const std::vector<torch::Tensor>& params);

  std::vector<torch::Tensor> tensors_;  // the parameters, as in fused().parameters()

 private:
  // A weight when the core's view of it was made.
  struct BoundWeight {
    Place place;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    c10::Storage storage;  // kept alive, so that no other weight can be allocated at its address
    int64_t version = 0;   // torch's version counter when the master was last up to date
  };

  void check_same_parameters() const;
  bool weights_moved();
  void reorder_state();
  void mark_masters_current();

  std::vector<BoundWeight> bound_;  // of tensors_
};

/// A FusedBody after bind() and refresh(), with the core on LibTorch's current stream.
class BoundBody {
 public:
  BoundBody(FusedBody& body, torch::optim::Optimizer& optimizer, bool with_gradients)
      : body_(body) {
    body_.bind(optimizer, {});
    body_.refresh(with_gradients);
  }
  FusedBody* operator->() { return &body_; }

 private:
  TorchStream stream_;
  FusedBody& body_;
};

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_FUSED_H_
