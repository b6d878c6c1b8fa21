// The job over MPI, started by mpirun.
#include <headroom/mpi.h>

#include "tests/agree/job.h"

int main(int argc, char** argv) {
  using namespace headroom;
  const JobOptions options = parse_job_options(argc, argv);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  const int code = [&] {
    const auto ranks = std::make_shared<mpi::MpiRanks>(MPI_COMM_WORLD, options.time_limit);
    Job job(ranks, options, [](float* data, size_t count) {
      MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    });
    return job.run();
  }();
  if (code != 0) std::_Exit(code);  // MPI_Finalize would wait for the other ranks
  MPI_Finalize();
  return code;
}
