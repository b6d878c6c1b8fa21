#include <headroom/headroom.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app("Headroom: loss scaling for mixed-precision training.", "headroom");
  app.set_version_flag("--version", "headroom " HEADROOM_VERSION);
  app.require_subcommand(1);
  headroom::cli::Action action;
  headroom::cli::add_train(app, &action);
  headroom::cli::add_compare(app, &action);
  headroom::cli::add_report(app, &action);
  headroom::cli::add_inspect(app, &action);
  headroom::cli::add_replay(app, &action);
  headroom::cli::add_bench(app, &action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // 0 for --help and --version, 2 for a command line that cannot be used.
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    return action();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "headroom: %s\n", error.what());
    return 2;
  }
}
