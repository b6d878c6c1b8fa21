// headroom::mpi: agreement between the processes of an MPI communicator.
#ifndef HEADROOM_MPI_H_
#define HEADROOM_MPI_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <mpi.h>

#include <chrono>
#include <memory>

namespace headroom::mpi {

/// The ranks of a communicator. A reduction is a reduce to rank 0 followed by a broadcast, so that
/// all ranks get the same bits on every network.
///
/// The constructor duplicates the communicator, so that messages cannot be mixed up with the
/// caller's; all ranks of `communicator` must construct one at the same time. One thread at a time
/// may use an object; MPI must be initialized with MPI_THREAD_SERIALIZED if that is not always the
/// main thread. Destroy it before MPI_Finalize.
///
/// After Error(kRankLost) all further calls throw, and MPI_Finalize may hang; end such a job with
/// MPI_Abort.
class HEADROOM_API MpiRanks : public Ranks {
 public:
  /// Throws Error(kWrongOrder) before MPI_Init, and Error(kInvalidArgument) unless the time limit
  /// is positive.
  explicit MpiRanks(MPI_Comm communicator = MPI_COMM_WORLD,
                    std::chrono::milliseconds time_limit = kDefaultTimeLimit);
  ~MpiRanks() override;
  MpiRanks(const MpiRanks&) = delete;
  MpiRanks& operator=(const MpiRanks&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) override;

 private:
  struct Exchange;

  int rank_ = 0;
  int size_ = 1;
  std::chrono::milliseconds time_limit_;
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace headroom::mpi

#endif  // HEADROOM_MPI_H_
