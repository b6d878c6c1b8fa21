#ifndef HEADROOM_LIBTORCH_RANKS_H_
#define HEADROOM_LIBTORCH_RANKS_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <torch/types.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <vector>

namespace headroom::libtorch {

/// The ranks of a c10d process group: Gloo, NCCL, MPI or any other that can all-reduce doubles. It
/// uses the group like any collective does: all ranks in the same order, one thread at a time.
///
///     auto ranks = std::make_shared<ProcessGroupRanks>(group);
///     GradScaler scaler(GradScalerOptions().ranks(ranks));
///
/// A group for CUDA tensors (NCCL) gets one as its device. Then a scaler on that device agrees
/// without a wait, on torch's current stream, and a lost rank is the group's to find.
///
/// After Error(kRankLost) it refuses all further calls. Groups of LibTorch 1.13 are ProcessGroups;
/// in 2.x those that one makes by hand are Backends.
class HEADROOM_API ProcessGroupRanks : public Ranks {
 public:
  explicit ProcessGroupRanks(c10::intrusive_ptr<c10d::ProcessGroup> group,
                             std::chrono::milliseconds time_limit = kDefaultTimeLimit,
                             const torch::Device& device = torch::kCPU);
  explicit ProcessGroupRanks(c10::intrusive_ptr<c10d::Backend> group,
                             std::chrono::milliseconds time_limit = kDefaultTimeLimit,
                             const torch::Device& device = torch::kCPU);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) override;

  bool enqueues() const override { return device_.is_cuda(); }
  void enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
               void* stream) override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;

  template <typename Group>
  void take(c10::intrusive_ptr<Group> group);
  Work all_reduce(const torch::Tensor& tensor, c10d::ReduceOp::RedOpType op);

  std::function<Work(std::vector<torch::Tensor>&, const c10d::AllreduceOptions&)> all_reduce_;
  int rank_ = 0;
  int size_ = 1;
  std::chrono::milliseconds time_limit_;
  torch::Device device_;
  bool lost_ = false;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_RANKS_H_
