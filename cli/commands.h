// cli/ is the program `headroom`. Each command is one file: it adds its options to the parser and
// leaves a function that does the work and returns the exit status. What needs LibTorch is in a
// program of its own, headroom-train (train/), to which hand_over.cc leads.
#ifndef HEADROOM_CLI_COMMANDS_H_
#define HEADROOM_CLI_COMMANDS_H_

#include <CLI/CLI.hpp>
#include <functional>

namespace headroom::cli {

/// What main runs after parsing: set by the command that was named.
using Action = std::function<int()>;

inline constexpr const char* kAboutTrain = "Train a model in mixed precision";
inline constexpr const char* kAboutCompare =
    "Train the same model in fp32, fp16 with and without scaling, and bf16";

void add_train(CLI::App& app, Action* action);
void add_compare(CLI::App& app, Action* action);
void add_inspect(CLI::App& app, Action* action);
void add_policies(CLI::App& app, Action* action);
void add_replay(CLI::App& app, Action* action);
void add_report(CLI::App& app, Action* action);
void add_bench(CLI::App& app, Action* action);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_COMMANDS_H_
