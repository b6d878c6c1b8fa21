// headroom::nccl: agreement between the GPUs of an NCCL communicator.
#ifndef HEADROOM_NCCL_H_
#define HEADROOM_NCCL_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <nccl.h>

#include <chrono>
#include <memory>

namespace headroom::nccl {

/// The ranks of a communicator. The caller owns the communicator and must keep it alive. As with
/// every collective, all ranks must make the same calls in the same order, from one thread at a
/// time.
///
/// With a scaler on the communicator's device (ScalerOptions::device) nothing waits: two small
/// all-reduces are enqueued between measure and decide, also during the capture of a CUDA graph.
/// The caller must detect lost ranks, as with every NCCL call (ncclCommGetAsyncError,
/// ncclCommAbort).
///
/// With a scaler on the CPU the reduction waits and throws Error(kRankLost) when the time limit is
/// exceeded. All further calls then throw; ncclCommAbort ends the pending work.
class HEADROOM_API NcclRanks : public Ranks {
 public:
  /// Allocates memory and a stream on the communicator's device. Throws Error(kInvalidArgument)
  /// unless the time limit is positive.
  explicit NcclRanks(ncclComm_t communicator,
                     std::chrono::milliseconds time_limit = kDefaultTimeLimit);
  ~NcclRanks() override;
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) override;

  bool enqueues() const override { return true; }
  void enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
               void* stream) override;

 private:
  struct Exchange;

  ncclComm_t communicator_;
  int rank_ = 0;
  int size_ = 1;
  std::chrono::milliseconds time_limit_;
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace headroom::nccl

#endif  // HEADROOM_NCCL_H_
