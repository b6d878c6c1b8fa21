// cli/ is the program `headroom`. Each command is one file: it adds its options to the parser and
// leaves a function that does the work and returns the exit status.
#ifndef HEADROOM_CLI_COMMANDS_H_
#define HEADROOM_CLI_COMMANDS_H_

#include <CLI/CLI.hpp>
#include <functional>

namespace headroom::cli {

/// What main runs after parsing: set by the command that was named.
using Action = std::function<int()>;

void add_train(CLI::App& app, Action* action);
void add_compare(CLI::App& app, Action* action);
void add_inspect(CLI::App& app, Action* action);
void add_replay(CLI::App& app, Action* action);
void add_report(CLI::App& app, Action* action);
void add_bench(CLI::App& app, Action* action);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_COMMANDS_H_
