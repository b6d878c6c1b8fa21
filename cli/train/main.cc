// headroom-train: what `headroom` hands over to.
#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace headroom::cli;
  return run_program(argc, argv, {add_train, add_compare, add_bench});
}
