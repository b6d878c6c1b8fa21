// Replaces ranks_gloo.cc where Gloo is not installed.
#include "cli/train/ranks.h"

namespace headroom::cli {

std::unique_ptr<Team> make_gloo_team(const Launch&, std::chrono::milliseconds) { return nullptr; }

}  // namespace headroom::cli
