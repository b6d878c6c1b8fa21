#include "cli/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <headroom/version.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "cli/output.h"

namespace headroom::cli {
namespace {

constexpr int kBadInput = 2;

// Where standard input, output or error is closed, the next file that is opened would take its
// place, and what is told would go into that file.
void keep_places() {
  int file = 0;
  do file = ::open("/dev/null", O_RDONLY);
  while (file >= 0 && file <= STDERR_FILENO);
  if (file >= 0) ::close(file);
}

// The status, unless something that was printed is lost.
int after_printing(int status) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  tell("headroom: Standard output could not be written to its end.\n");
  return status == 0 ? kBadInput : status;
}

}  // namespace

int run_program(int argc, char** argv, const std::vector<void (*)(CLI::App&, Action*)>& commands) {
  keep_places();
  CLI::App app("Headroom: loss scaling for mixed-precision training.", "headroom");
  app.set_version_flag("--version", "headroom " HEADROOM_VERSION);
  app.require_subcommand(1);
  Action action;
  for (const auto& add : commands) add(app, &action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> unknown = app.remaining();
    if (error.get_exit_code() != 0 && app.get_subcommands().empty() && !unknown.empty()) {
      tell(fmt::format("headroom: '{}' is no command; headroom --help lists them.\n", unknown[0]));
      return kBadInput;
    }
    // 0 for --help and --version.
    return after_printing(app.exit(error) == 0 ? 0 : kBadInput);
  }
  try {
    return after_printing(action());
  } catch (const std::exception& error) {
    tell(fmt::format("headroom: {}\n", error.what()));
    return kBadInput;
  }
}

}  // namespace headroom::cli
