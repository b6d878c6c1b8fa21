// headroom::mpi: ranks over an MPI communicator.
#ifndef HEADROOM_MPI_H_
#define HEADROOM_MPI_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <mpi.h>

#include <chrono>
#include <memory>

namespace headroom::mpi {

/// The ranks of a communicator. A reduction is a tree reduction to rank 0 followed by a broadcast,
/// so that all ranks get the same bits.
///
/// The constructor duplicates the communicator, which is a collective call: all ranks of
/// `communicator` construct an MpiRanks at the same time. Not thread-safe; MPI has to be
/// initialized with MPI_THREAD_SERIALIZED if it is used outside of the main thread. Destroy it
/// before MPI_Finalize.
///
/// After Error(kRankLost) it refuses all further calls, and MPI_Finalize may hang: end such a job
/// with MPI_Abort.
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
