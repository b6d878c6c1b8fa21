#include "cli/program.h"

#include <headroom/version.h>

#include <cstdio>
#include <exception>

namespace headroom::cli {

int run_program(int argc, char** argv, const std::vector<void (*)(CLI::App&, Action*)>& commands) {
  CLI::App app("Headroom: loss scaling for mixed-precision training.", "headroom");
  app.set_version_flag("--version", "headroom " HEADROOM_VERSION);
  app.require_subcommand(1);
  Action action;
  for (const auto& add : commands) add(app, &action);
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

}  // namespace headroom::cli
