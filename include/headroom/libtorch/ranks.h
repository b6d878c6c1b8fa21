// Ranks over torch's process groups (c10d), for scalers that decide together.
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

/// The ranks of a c10d process group: Gloo, NCCL, MPI or any other. As with every collective, all
/// ranks must make the same calls in the same order, from one thread at a time.
///
///     auto ranks = std::make_shared<ProcessGroupRanks>(group);
///     GradScaler scaler(GradScalerOptions().ranks(ranks));
///
/// A scaler on the CPU gathers the messages of all ranks, in one collective, and every rank
/// combines them in the same order, so that all get the same bits.
///
/// For a group of CUDA tensors (NCCL) pass a CUDA device. A scaler on that device then enqueues two
/// all-reduces on torch's current stream and does not wait; the group detects lost ranks.
///
/// After Error(kRankLost) all further calls throw.
class HEADROOM_API ProcessGroupRanks : public Ranks {
 public:
  /// What the functions of a Group take and return.
  using Tensors = std::vector<torch::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// The functions of a process group that are used.
  struct Group {
    int rank = 0;
    int size = 1;
    std::function<Work(std::vector<Tensors>&, Tensors&)> all_gather;
    std::function<Work(Tensors&, const c10d::AllreduceOptions&)> all_reduce;
  };

  /// `group` is a c10d::ProcessGroup or one of its backends (process groups too in LibTorch 1.13).
  /// Throws Error(kInvalidArgument) unless the time limit is positive.
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

  /// For process groups of other types; the device is where messages are put.
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
