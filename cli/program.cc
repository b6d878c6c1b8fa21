#include "cli/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <headroom/version.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <exception>
#include <sstream>
#include <string>

#include "cli/completion.h"
#include "cli/examples.h"
#include "cli/output.h"
#include "cli/suggest.h"

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

std::string& name_called() {
  static std::string name = "headroom";
  return name;
}

// Prints what --help or --version asked for.
int print_answer(const CLI::App& app, const CLI::ParseError& asked) {
  std::ostringstream output;
  app.exit(asked, output, output);
  print_text(output.str());
  return finish_output(0);
}

int refuse_arguments(const std::string& sentence) {
  print_error(fmt::format("headroom: {}\n", sentence));
  return kBadInput;
}

}  // namespace

const std::string& called_as() { return name_called(); }

std::vector<std::string> read_arguments(int argc, char** argv) {
  if (argc > 0 && *argv[0] != '\0') name_called() = argv[0];
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (!arguments.empty() && arguments[0] == "help") {
    arguments.erase(arguments.begin());
    arguments.resize(std::min<size_t>(arguments.size(), 1));
    arguments.emplace_back("--help");
  }
  return arguments;
}

int run_program(std::vector<std::string> arguments,
                const std::vector<void (*)(CLI::App&, Action*)>& commands) {
  open_standard_streams();
  ignore_write_signals();
  CLI::App app("Headroom: loss scaling for mixed-precision training.", "headroom");
  app.set_help_flag("-h,--help", "print this help and exit");
  app.set_version_flag("-V,--version", "headroom " HEADROOM_VERSION, "print the version and exit");
  app.require_subcommand(1);
  Action action;
  for (const auto& add : commands) add(app, &action);
  app.footer("'headroom help COMMAND' shows options, defaults and examples of a command.");
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    command->footer(examples_of(command->get_name()) + command->get_footer());
  }
  if (asks_for_candidates(arguments)) {
    for (const std::string& word : candidates(app, {arguments.begin() + 2, arguments.end()})) {
      print("{}\n", word);
    }
    return finish_output(0);
  }
  const std::string no_command = unknown_command(app, arguments);
  if (!no_command.empty()) return refuse_arguments(no_command);
  std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 expects
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? print_answer(app, error)
                                      : refuse_arguments(mistake_in_arguments(app, error));
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
