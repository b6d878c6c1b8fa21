// Which arguments headroom-train gets.
#ifndef HEADROOM_CLI_HAND_OVER_H_
#define HEADROOM_CLI_HAND_OVER_H_

#include <string>
#include <vector>

namespace headroom::cli {

/// Stores the arguments (without the program) for commands that headroom-train executes.
void hand_over_arguments(std::vector<std::string> arguments);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_HAND_OVER_H_
