// headroom: all commands; `train` and `compare` are executed by headroom-train.
#include "cli/completion.h"
#include "cli/hand_over.h"
#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace headroom::cli;
  std::vector<std::string> arguments = read_arguments(argc, argv);
  hand_over_arguments(arguments);
  const auto trains = [](const std::string& word) { return word == "train" || word == "compare"; };
  // headroom-train parses the options of these two, and knows what completes them.
  if (!arguments.empty() && trains(arguments[0])) arguments.resize(1);
  if (asks_for_candidates(arguments) && arguments.size() > 3 && trains(arguments[2])) {
    arguments = {arguments[2]};
  }
  return run_program(std::move(arguments),
                     {add_train, add_compare, add_report, add_diagnose, add_inspect, add_policies,
                      add_replay, add_state, add_doctor, add_bench, add_completion});
}
