// headroom::nccl: ranks over an NCCL communicator.
#ifndef HEADROOM_NCCL_H_
#define HEADROOM_NCCL_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <nccl.h>

#include <chrono>
#include <memory>

namespace headroom::nccl {

/// The ranks of a communicator, which belongs to the caller and must outlive this object. The rules
/// of NCCL's collectives apply: all ranks call in the same order, from one thread at a time.
///
/// With a scaler on the communicator's device (ScalerOptions::device) nothing waits: two small
/// all-reduces are enqueued between measuring and deciding, also in CUDA graphs. The caller has to
/// detect lost ranks, as with every NCCL call (ncclCommGetAsyncError, ncclCommAbort). A scaler on
/// the CPU waits and throws Error(kRankLost) after the time limit; this object then refuses all
/// further calls, and ncclCommAbort ends the pending operation.
class HEADROOM_API NcclRanks : public Ranks {
 public:
  /// Allocates memory and creates a stream on the communicator's device.
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
