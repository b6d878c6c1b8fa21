#include <fmt/format.h>
#include <headroom/error.h>
#include <headroom/record.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cli/commands.h"
#include "cli/diagnose.h"
#include "cli/output.h"
#include "cli/serve.h"

namespace headroom::cli {
namespace {

struct ReportOptions {
  std::string folder;
  std::string out;
  bool watch = false;
  int port = 0;
};

int report(const ReportOptions& options) {
  if (options.watch) {
    LiveReport server(options.port);
    server.start(options.folder);
    print("The report is at {} until you press Ctrl-C.\n", server.url());
    flush_output();
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  if (std::filesystem::path(options.out).filename() == "history.jsonl") {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--out is '{}', which is the name of a history; choose another file for "
                    "the report.",
                    options.out));
  }
  std::vector<std::string> left_out;
  write_report(options.folder, options.out, &left_out);
  print_left_out(left_out);
  const auto path = std::filesystem::path(options.folder) / "report.html";
  print_error(fmt::format("{}\n", options.out.empty() ? path.string() : options.out));
  print_diagnoses(options.folder);
  return 0;
}

}  // namespace

void add_report(CLI::App& app, Action* action) {
  const auto options = std::make_shared<ReportOptions>();
  CLI::App* const command =
      app.add_subcommand("report", "Write an HTML report of a run, or of all runs below a folder");
  command
      ->add_option("dir", options->folder,
                   "folder with a history.jsonl, or with such folders below it")
      ->required();
  command->add_option("--out", options->out, "file to write (default: report.html in the folder)");
  CLI::Option* const watch =
      command->add_flag("--watch", options->watch,
                        "serve a live report on 127.0.0.1 instead, while the runs are training");
  command->add_option("--port", options->port, "port for --watch (default: a free one)")
      ->check(CLI::Range(0, 65535))
      ->needs(watch);
  command->callback([=] { *action = [=] { return report(*options); }; });
}

}  // namespace headroom::cli
