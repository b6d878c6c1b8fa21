// Data-parallel training by several processes, started by mpirun or torchrun, which describe the
// ranks in environment variables.
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

/// Reads the environment. Throws Error(kInvalidArgument) if its variables are inconsistent.
Launch launch_from_environment();

/// The group of ranks that train one model.
class Team {
 public:
  virtual ~Team() = default;

  const std::shared_ptr<Ranks>& ranks() const { return ranks_; }

  /// Replaces all gradients and the loss by their means over the ranks, computed in FP32. Returns
  /// whether any rank passed `stop`. Throws Error(kRankLost).
  bool average(const std::vector<torch::Tensor>& parameters, double* loss, bool stop);

  /// Throws Error(kRanksDiffer) unless all ranks have the same weights.
  void check_same(const std::vector<torch::Tensor>& parameters);

  /// Ends this process, and the other ranks if possible, without waiting for them.
  virtual void abort(int code) = 0;

 protected:
  /// Sums over all ranks, in place.
  virtual void all_reduce_sum(float* data, int64_t count) = 0;

  std::shared_ptr<Ranks> ranks_;
};

/// Connects to the other ranks; returns null if there are none. Throws Error(kRankLost) if they do
/// not connect in time, Error(kUnsupported) if this build has no MPI or Gloo.
std::unique_ptr<Team> make_team(const Launch& launch, std::chrono::milliseconds time_limit);

/// The backends; null if this build does not have them.
std::unique_ptr<Team> make_mpi_team(std::chrono::milliseconds time_limit);
std::unique_ptr<Team> make_gloo_team(const Launch& launch, std::chrono::milliseconds time_limit);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_RANKS_H_
