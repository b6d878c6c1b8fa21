// headroom::nccl: ranks that are the GPUs of an NCCL communicator.
#ifndef HEADROOM_NCCL_H_
#define HEADROOM_NCCL_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <nccl.h>

#include <chrono>
#include <memory>

namespace headroom::nccl {

/// The ranks of a communicator, which stays the caller's and has to live longer. It is used like
/// any collective does: all ranks in the same order, one thread at a time.
///
/// Of a scaler on the communicator's device (ScalerOptions::device) nothing waits: two small
/// all-reduces go to the stream between measuring and deciding, in CUDA graphs as well. A rank that
/// is lost is then the caller's to find, as with every NCCL call (ncclCommGetAsyncError,
/// ncclCommAbort). A scaler on the CPU waits, and gets Error(kRankLost) after the time limit; the
/// object then refuses all further calls, and ncclCommAbort ends what is still under way.
class HEADROOM_API NcclRanks : public Ranks {
 public:
  /// Takes memory and a stream on the communicator's device.
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
