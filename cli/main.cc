#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace headroom::cli;
  return run_program(argc, argv,
                     {add_train, add_compare, add_report, add_inspect, add_replay, add_bench});
}
