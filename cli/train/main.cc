// headroom-train: runs the commands of `headroom` that need LibTorch.
#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace headroom::cli;
  return run_program(read_arguments(argc, argv), {add_train, add_compare, add_bench});
}
