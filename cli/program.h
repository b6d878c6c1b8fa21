// The frame of both programs: parsing, error messages, exit status.
#ifndef HEADROOM_CLI_PROGRAM_H_
#define HEADROOM_CLI_PROGRAM_H_

#include <vector>

#include "cli/commands.h"

namespace headroom::cli {

/// Parses the command line and runs the named command. Returns the exit status.
int run_program(int argc, char** argv, const std::vector<void (*)(CLI::App&, Action*)>& commands);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_PROGRAM_H_
