// The processes that train one model together, each on its part of every batch. mpirun or torchrun
// has started them; what they need to know of each other is in the environment.
#ifndef HEADROOM_CLI_TRAIN_RANKS_H_
#define HEADROOM_CLI_TRAIN_RANKS_H_

#include <headroom/agree.h>
#include <torch/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace headroom::cli {

/// How this process was started.
struct Launch {
  enum class By { kHand, kMpirun, kTorchrun };
  By by = By::kHand;
  int rank = 0;
  int size = 1;
  int local_size = 1;  // ranks on this machine

  bool several() const { return size > 1; }
  bool first() const { return rank == 0; }
};

/// Reads the environment. Throws Error(kInvalidArgument) if it makes no sense.
Launch launched();

class Team {
 public:
  virtual ~Team() = default;

  const std::shared_ptr<Ranks>& ranks() const { return ranks_; }

  /// Makes all gradients the mean over the ranks, in FP32, and the loss as well. Returns whether
  /// any rank wants to stop. Throws Error(kRankLost).
  bool average(const std::vector<torch::Tensor>& parameters, double* loss, bool stop);

  /// Throws Error(kRanksDiffer) unless all ranks have the same weights.
  void check_same(const std::vector<torch::Tensor>& parameters);

  /// Ends this process, and the others if that can be done, without waiting for anybody.
  virtual void abort(int code) = 0;

 protected:
  /// Adds up over all ranks, in place.
  virtual void add_up(float* data, int64_t count) = 0;

  std::shared_ptr<Ranks> ranks_;
};

/// Meets the other processes; null if this one is alone. Throws Error(kRankLost) if they do not
/// come, Error(kUnsupported) if this build has no way to them.
std::unique_ptr<Team> make_team(const Launch& launch, std::chrono::milliseconds time_limit);

/// One for each way; null if this build does not have it.
std::unique_ptr<Team> make_mpi_team(std::chrono::milliseconds time_limit);
std::unique_ptr<Team> make_gloo_team(const Launch& launch, std::chrono::milliseconds time_limit);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_RANKS_H_
