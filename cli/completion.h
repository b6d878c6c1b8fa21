// Completion in bash, zsh and fish: `headroom completion SHELL` prints a script, which calls
// `headroom completion candidates WORD...` for the words typed so far.
#ifndef HEADROOM_CLI_COMPLETION_H_
#define HEADROOM_CLI_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"

namespace headroom::cli {

/// Whether the arguments (without the program) ask for candidates.
bool asks_for_candidates(const std::vector<std::string>& arguments);

/// What may take the place of the last word; nothing where the shell should offer files.
std::vector<std::string> candidates(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_COMPLETION_H_
