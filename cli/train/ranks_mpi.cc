// Ranks over MPI, for mpirun.
#include <headroom/error.h>
#include <headroom/mpi.h>

#include <cstdlib>
#include <thread>

#include "cli/train/ranks.h"

namespace headroom::cli {
namespace {

class MpiTeam : public Team {
 public:
  explicit MpiTeam(std::chrono::milliseconds time_limit) : time_limit_(time_limit) {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
    ranks_ = std::make_shared<mpi::MpiRanks>(MPI_COMM_WORLD, time_limit);
  }

  ~MpiTeam() override {
    ranks_ = nullptr;
    MPI_Finalize();
  }

  void abort(int code) override {
    MPI_Abort(MPI_COMM_WORLD, code);
    std::_Exit(code);
  }

 protected:
  void all_reduce_sum(float* data, int64_t count) override {
    const auto start = std::chrono::steady_clock::now();
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Iallreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                   &request);
    for (int done = 0; done == 0;) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done == 0 && std::chrono::steady_clock::now() - start > time_limit_) {
        throw Error(ErrorCode::kRankLost,
                    "Another rank did not reach the averaging of the gradients within " +
                        std::to_string(time_limit_.count() / 1000) +
                        " s; it has ended or is stuck. Look at its output, and start again.");
      }
      if (done == 0) std::this_thread::yield();
    }
  }

 private:
  std::chrono::milliseconds time_limit_;
};

}  // namespace

std::unique_ptr<Team> make_mpi_team(std::chrono::milliseconds time_limit) {
  return std::make_unique<MpiTeam>(time_limit);
}

}  // namespace headroom::cli
