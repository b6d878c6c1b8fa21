// headroom::mpi: ranks that are the processes of an MPI communicator.
#ifndef HEADROOM_MPI_H_
#define HEADROOM_MPI_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <mpi.h>

#include <chrono>
#include <memory>

namespace headroom::mpi {

/// The ranks of a communicator. A reduction goes up a tree to rank 0 and comes back as a broadcast,
/// so that all have the same bits whatever the network does.
///
/// Messages have a communicator of their own, which the constructor duplicates: all ranks of
/// `communicator` make one at the same time. One thread at a time may use it, and MPI has to be
/// initialized with MPI_THREAD_SERIALIZED if that is not always the main thread. It has to be gone
/// before MPI_Finalize.
///
/// After Error(kRankLost) it refuses all further calls, and MPI_Finalize may hang: MPI_Abort ends
/// such a job.
class HEADROOM_API MpiRanks : public Ranks {
 public:
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
