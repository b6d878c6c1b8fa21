// Replaces ranks_mpi.cc where MPI is not installed.
#include "cli/train/ranks.h"

namespace headroom::cli {

std::unique_ptr<Team> make_mpi_team(std::chrono::milliseconds) { return nullptr; }

}  // namespace headroom::cli
