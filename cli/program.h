// The frame of both programs: parsing, error messages, exit status.
#ifndef HEADROOM_CLI_PROGRAM_H_
#define HEADROOM_CLI_PROGRAM_H_

#include <string>
#include <vector>

#include "cli/commands.h"

namespace headroom::cli {

/// The arguments without the program, whose name called_as() returns. "help" and "help COMMAND"
/// become "--help" and "COMMAND
/// --help".
std::vector<std::string> read_arguments(int argc, char** argv);

/// How the program was called, for commands that are printed to be copied: argv[0], which ./run
/// sets to its own name. "headroom" before read_arguments().
const std::string& called_as();

/// Parses the arguments and runs the named command. Returns the exit status.
int run_program(std::vector<std::string> arguments,
                const std::vector<void (*)(CLI::App&, Action*)>& commands);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_PROGRAM_H_
