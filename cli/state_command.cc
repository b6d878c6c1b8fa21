// `headroom state` and `headroom doctor` are part of the Python package, whose `headroom` command
// runs them: one reads files of PyTorch and Keras, the other examines the package. This program
// only says so.
#include <headroom/error.h>

#include <string>

#include "cli/commands.h"

namespace headroom::cli {
namespace {

void add(const std::string& name, const char* about, const char* call, CLI::App& app,
         Action* action) {
  auto* command = app.add_subcommand(name, std::string(about) + " (in the Python package)");
  command->allow_extras();
  command->callback([=] {
    *action = [=]() -> int {
      throw Error(ErrorCode::kUnsupported,
                  "'" + name +
                      "' is part of the Python package: run pip install . in a clone of Headroom, "
                      "then python -m headroom " +
                      call + ".");
    };
  });
}

}  // namespace

void add_state(CLI::App& app, Action* action) {
  add("state", "Show or convert a saved scaler of another framework", "state FILE", app, action);
}

void add_doctor(CLI::App& app, Action* action) {
  add("doctor", "Show what Headroom finds on this machine, and test it", "doctor", app, action);
}

}  // namespace headroom::cli
