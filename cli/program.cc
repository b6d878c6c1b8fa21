#include "cli/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <headroom/version.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <exception>
#include <sstream>
#include <string>

#include "cli/output.h"

namespace headroom::cli {
namespace {

constexpr int kBadInput = 2;
constexpr int kReaderGone = 128 + SIGPIPE;  // what a shell shows for a program that SIGPIPE killed

// Where standard input, output or error is closed, the next file that is opened would take its
// place, and what is told would go into that file.
void keep_places() {
  int file = 0;
  do file = ::open("/dev/null", O_RDONLY);
  while (file >= 0 && file <= STDERR_FILENO);
  if (file >= 0) ::close(file);
}

// Writing to a pipe that nobody reads, or beyond the limit of a file's size, kills a program unless
// it ignores these signals: a run would be lost with its last steps. Ignored, they are errors of
// the call that writes.
void make_signals_errors() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

// The status, unless something that was printed is lost.
int after_printing(int status) {
  const int error = flush_output();
  if (error == 0) return status;
  const bool gone = error == EPIPE;  // a reader that has seen enough, such as head, is no news
  if (!gone) tell("headroom: Standard output could not be written completely.\n");
  if (status != 0) return status;
  return gone ? kReaderGone : kBadInput;
}

// What the parser has to say: help, the version, or what is wrong with the arguments.
int say(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream output;
  std::stringstream errors;
  const int status = app.exit(error, output, errors);
  print_text(output.str());
  for (std::string line; std::getline(errors, line);) tell(line + "\n");
  return after_printing(status == 0 ? 0 : kBadInput);
}

}  // namespace

int run_program(int argc, char** argv, const std::vector<void (*)(CLI::App&, Action*)>& commands) {
  keep_places();
  make_signals_errors();
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
    return say(app, error);
  }
  try {
    return after_printing(action());
  } catch (const OutputLost&) {
    return after_printing(0);
  } catch (const std::exception& error) {
    tell(fmt::format("headroom: {}\n", error.what()));
    return kBadInput;
  }
}

}  // namespace headroom::cli
