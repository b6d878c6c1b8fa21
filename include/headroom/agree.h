// agree: the ranks that train one model together come to one verdict. Between measure and decide,
// what each rank found in its gradients is combined in one small message, so that all of them apply
// or skip the same step and move to the same scale. Headroom has ranks over MPI (headroom/mpi.h),
// c10d (headroom/libtorch/ranks.h) and NCCL (headroom/nccl.h); derive from Ranks for another way.
#ifndef HEADROOM_AGREE_H_
#define HEADROOM_AGREE_H_

#include <headroom/export.h>

#include <chrono>
#include <cstddef>
#include <string>

namespace headroom {

/// The ranks that train one model together, as one of them sees it. Several scalers may share one,
/// as long as all ranks step them in the same order.
class HEADROOM_API Ranks {
 public:
  virtual ~Ranks();

  virtual int rank() const = 0;  // from 0
  virtual int size() const = 0;

  /// Waits for all ranks. On return each of them has the same bits: `sums` are added up over all
  /// ranks, `maxima` are the largest of each. No number is NaN. All ranks call with the same two
  /// sizes, in the same order. Throws Error(kRankLost) if a rank is gone or does not come within
  /// the time limit.
  virtual void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) = 0;

  /// Whether enqueue() works, which a scaler on a CUDA device needs.
  virtual bool enqueues() const { return false; }

  /// reduce() on memory of a CUDA device, enqueued on a stream (a cudaStream_t): nothing waits, and
  /// it may be captured in a CUDA graph. Throws Error(kUnsupported) unless enqueues().
  virtual void enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
                       void* stream);

 protected:
  /// For reduce(): throw Error(kRankLost) because a rank did not come (`how`: "within 200 ms"), or
  /// because one was lost in an earlier call.
  [[noreturn]] static void throw_did_not_come(const std::string& how);
  [[noreturn]] static void throw_lost_before();
};

/// How long Headroom's own ranks wait for each other unless told otherwise.
inline constexpr std::chrono::milliseconds kDefaultTimeLimit = std::chrono::minutes(5);

/// What the ranks have in their gradients when they step.
enum class RankGradients {
  /// The same: averaged over the ranks before, as in plain data parallelism. Ranks whose norms
  /// differ have drifted apart, which is an error.
  kReplicated,
  /// Each its own part (ZeRO, FSDP, tensor and pipeline parallelism): counts and squares are added
  /// up, so that norm and clipping are those of the whole.
  kSharded,
};

}  // namespace headroom

#endif  // HEADROOM_AGREE_H_
