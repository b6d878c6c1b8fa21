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
constexpr int kReaderGone = 128 + SIGPIPE;  // a shell's status for a program killed by SIGPIPE

// Opens /dev/null for closed standard streams. Otherwise the next file to be opened would get the
// descriptor of a stream, and messages would be written into that file.
void open_standard_streams() {
  int file = 0;
  do file = ::open("/dev/null", O_RDONLY);
  while (file >= 0 && file <= STDERR_FILENO);
  if (file >= 0) ::close(file);
}

// By default, writing to a pipe without a reader or beyond the file size limit kills the process,
// and with it a training run. With the signals ignored, the write fails with an error instead.
void ignore_write_signals() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

// Flushes the output. Returns `status`, or an error status if output was lost.
int finish_output(int status) {
  const int error = flush_output();
  if (error == 0) return status;
  const bool gone = error == EPIPE;  // a reader that has exited, such as head, is not an error
  if (!gone) print_error("headroom: Standard output could not be written completely.\n");
  if (status != 0) return status;
  return gone ? kReaderGone : kBadInput;
}

// Prints the parser's message: help, the version, or an error in the arguments.
int print_parser_message(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream output;
  std::stringstream errors;
  const int status = app.exit(error, output, errors);
  print_text(output.str());
  for (std::string line; std::getline(errors, line);) print_error(line + "\n");
  return finish_output(status == 0 ? 0 : kBadInput);
}

}  // namespace

int run_program(int argc, char** argv, const std::vector<void (*)(CLI::App&, Action*)>& commands) {
  open_standard_streams();
  ignore_write_signals();
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
      print_error(fmt::format("headroom: '{}' is not a command; headroom --help lists them.\n",
                              unknown[0]));
      return kBadInput;
    }
    return print_parser_message(app, error);
  }
  try {
    return finish_output(action());
  } catch (const OutputLost&) {
    return finish_output(0);
  } catch (const std::exception& error) {
    print_error(fmt::format("headroom: {}\n", error.what()));
    return kBadInput;
  }
}

}  // namespace headroom::cli
