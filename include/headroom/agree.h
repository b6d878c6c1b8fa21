// agree: ranks that train one model together make one decision. Between measure and decide, the
// statistics of all ranks are combined in one small message, so that all of them apply or skip the
// same step and use the same scale. There are implementations for MPI (headroom/mpi.h), c10d
// (headroom/libtorch/ranks.h) and NCCL (headroom/nccl.h); derive from Ranks for another library.
#ifndef HEADROOM_AGREE_H_
#define HEADROOM_AGREE_H_

#include <headroom/export.h>

#include <chrono>
#include <cstddef>
#include <string>

namespace headroom {

/// The communication of one rank with all others. Several scalers may share a Ranks object, if all
/// ranks step them in the same order.
class HEADROOM_API Ranks {
 public:
  virtual ~Ranks();

  virtual int rank() const = 0;  // from 0
  virtual int size() const = 0;

  /// Waits for all ranks. On return all of them have the same bits: each of `sums` summed and each
  /// of `maxima` maximised over the ranks. No number is NaN. All ranks call it with the same sizes,
  /// in the same order. Throws Error(kRankLost) if a rank has ended or does not call it within the
  /// time limit.
  virtual void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) = 0;

  /// Whether enqueue() is implemented; a scaler on a CUDA device needs it.
  virtual bool enqueues() const { return false; }

  /// reduce() on memory of a CUDA device, enqueued on a stream (a cudaStream_t): nothing waits, and
  /// it may be captured in a CUDA graph. Throws Error(kUnsupported) unless enqueues().
  virtual void enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
                       void* stream);

 protected:
  /// For implementations of reduce(): throw Error(kRankLost), because a rank did not answer (`how`:
  /// "within 200 ms"), or because one was lost in an earlier call.
  [[noreturn]] static void throw_did_not_come(const std::string& how);
  [[noreturn]] static void throw_lost_before();
};

/// How long Headroom's own ranks wait for each other by default.
inline constexpr std::chrono::milliseconds kDefaultTimeLimit = std::chrono::minutes(5);

/// How gradients are distributed over the ranks when they step.
enum class RankGradients {
  /// All ranks have the same gradients, averaged before step(), as in data parallelism. Ranks whose
  /// norms differ have drifted apart, which is an error.
  kReplicated,
  /// Each rank has its own part (ZeRO, FSDP, tensor and pipeline parallelism). Counts and squares
  /// are summed, so that norm and clipping are those of the whole model.
  kSharded,
};

}  // namespace headroom

#endif  // HEADROOM_AGREE_H_
