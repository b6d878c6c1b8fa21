#include <string_view>

#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace headroom::cli;
  // What follows these two is for headroom-train to read.
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "train" || command == "compare") argc = 2;
  return run_program(
      argc, argv,
      {add_train, add_compare, add_report, add_inspect, add_policies, add_replay, add_bench});
}
