// headroom: all commands; `train` and `compare` are executed by headroom-train.
#include <string_view>

#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace headroom::cli;
  // headroom-train parses the options of these two.
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "train" || command == "compare") argc = 2;
  return run_program(argc, argv,
                     {add_train, add_compare, add_report, add_diagnose, add_inspect, add_policies,
                      add_replay, add_state, add_bench});
}
