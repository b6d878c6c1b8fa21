// `headroom state` reads files of PyTorch and Keras and is therefore part of the Python package,
// whose `headroom` command runs it. This program only says so.
#include <headroom/error.h>

#include "cli/commands.h"

namespace headroom::cli {

void add_state(CLI::App& app, Action* action) {
  auto* command = app.add_subcommand(
      "state", "Show or convert a saved scaler of another framework (in the Python package)");
  command->allow_extras();
  command->callback([action] {
    *action = []() -> int {
      throw Error(ErrorCode::kUnsupported,
                  "'state' is part of the Python package: run pip install . in a clone of "
                  "Headroom, then python -m headroom state FILE.");
    };
  });
}

}  // namespace headroom::cli
