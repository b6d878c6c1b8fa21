// cli/: the program `headroom`. Each command is one file that adds its options to the parser and
// stores a function that does the work and returns the exit status. Commands that need LibTorch are
// in a separate program, headroom-train (train/), which hand_over.cc executes.
#ifndef HEADROOM_CLI_COMMANDS_H_
#define HEADROOM_CLI_COMMANDS_H_

#include <CLI/CLI.hpp>
#include <functional>

namespace headroom::cli {

/// The work of the command that was parsed; run by run_program().
using Action = std::function<int()>;

inline constexpr const char* kAboutTrain = "Train a model in mixed precision";
inline constexpr const char* kAboutCompare =
    "Train the same model in fp32, fp16 with and without scaling, and bf16";

void add_train(CLI::App& app, Action* action);
void add_compare(CLI::App& app, Action* action);
void add_inspect(CLI::App& app, Action* action);
void add_diagnose(CLI::App& app, Action* action);
void add_policies(CLI::App& app, Action* action);
void add_replay(CLI::App& app, Action* action);
void add_state(CLI::App& app, Action* action);
void add_doctor(CLI::App& app, Action* action);
void add_report(CLI::App& app, Action* action);
void add_bench(CLI::App& app, Action* action);
void add_completion(CLI::App& app, Action* action);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_COMMANDS_H_
