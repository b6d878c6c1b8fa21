// In place of the trainer where LibTorch is not installed.
#include <headroom/error.h>

#include "cli/commands.h"
#include "cli/train/step_bench.h"

namespace headroom::cli {
namespace {

void add_missing(CLI::App& app, const char* name, Action* action) {
  CLI::App* const command =
      app.add_subcommand(name, "Not in this build: it needs LibTorch")->allow_extras();
  command->callback([=] {
    *action = []() -> int {
      throw Error(ErrorCode::kUnsupported,
                  "This build of headroom was made without LibTorch and cannot train; install "
                  "libtorch-dev and build again.");
    };
  });
}

}  // namespace

void run_step_bench(int, const std::function<void(const StepFigure&)>&) {
  throw Error(ErrorCode::kUnsupported, "This build of headroom was made without LibTorch.");
}

void add_train(CLI::App& app, Action* action) { add_missing(app, "train", action); }
void add_compare(CLI::App& app, Action* action) { add_missing(app, "compare", action); }

}  // namespace headroom::cli
