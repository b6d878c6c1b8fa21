#ifndef HEADROOM_LIBTORCH_RANKS_H_
#define HEADROOM_LIBTORCH_RANKS_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <torch/types.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <vector>

namespace headroom::libtorch {

/// The ranks of a c10d process group: Gloo, NCCL, MPI or any other. It uses the group like any
/// collective does: all ranks in the same order, one thread at a time.
///
///     auto ranks = std::make_shared<ProcessGroupRanks>(group);
///     GradScaler scaler(GradScalerOptions().ranks(ranks));
///
/// On the host the messages of all ranks are gathered, and every rank combines them in the same
/// order: one collective, and the same bits everywhere.
///
/// A group for CUDA tensors (NCCL) gets one as its device. Then a scaler on that device agrees
/// without a wait, by two all-reduces on torch's current stream, and a lost rank is the group's to
/// find.
///
/// After Error(kRankLost) it refuses all further calls.
class HEADROOM_API ProcessGroupRanks : public Ranks {
 public:
  using Tensors = std::vector<torch::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// What is asked of a group.
  struct Group {
    int rank = 0;
    int size = 1;
    std::function<Work(std::vector<Tensors>&, Tensors&)> all_gather;
    std::function<Work(Tensors&, const c10d::AllreduceOptions&)> all_reduce;
  };

  /// A c10d::ProcessGroup, or one of its backends (which LibTorch 1.13 calls process groups too).
  template <typename T>
  explicit ProcessGroupRanks(c10::intrusive_ptr<T> group,
                             std::chrono::milliseconds time_limit = kDefaultTimeLimit,
                             const torch::Device& device = torch::kCPU)
      : ProcessGroupRanks(Group{group->getRank(), group->getSize(),
                                [group](std::vector<Tensors>& to, Tensors& from) {
                                  return group->allgather(to, from);
                                },
                                [group](Tensors& tensors, const c10d::AllreduceOptions& options) {
                                  return group->allreduce(tensors, options);
                                }},
                          time_limit, device) {}

  ProcessGroupRanks(Group group, std::chrono::milliseconds time_limit, const torch::Device& device);

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) override;

  bool enqueues() const override { return device_.is_cuda(); }
  void enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
               void* stream) override;

 private:
  Group group_;
  std::chrono::milliseconds time_limit_;
  torch::Device device_;
  bool lost_ = false;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_RANKS_H_
