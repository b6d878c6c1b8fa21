// The frame of both programs: parsing, error messages, exit status.
#ifndef HEADROOM_CLI_PROGRAM_H_
#define HEADROOM_CLI_PROGRAM_H_

#include <string>
#include <vector>

#include "cli/commands.h"

namespace headroom::cli {

/// The arguments without the program. "help" and "help COMMAND" become "--help" and "COMMAND
/// --help".
std::vector<std::string> read_arguments(int argc, char** argv);

/// Parses the arguments and runs the named command. Returns the exit status.
int run_program(std::vector<std::string> arguments,
                const std::vector<void (*)(CLI::App&, Action*)>& commands);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_PROGRAM_H_
