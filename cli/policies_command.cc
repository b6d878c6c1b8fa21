#include <fmt/format.h>
#include <headroom/policy.h>

#include "cli/commands.h"
#include "cli/output.h"

namespace headroom::cli {
namespace {

// Prints Markdown; docs/policies.md contains a copy of it.
int run() {
  print("| rule | setting | default | allowed | meaning |\n|---|---|---|---|---|\n");
  for (const SettingInfo& info : policy_settings()) {
    print("| {} | `{}` | {} | {} | {} |\n", to_string(info.rule), info.name, info.default_value,
          info.allowed, info.summary);
  }
  print("\n| preset | what it is |\n|---|---|\n");
  for (const PresetInfo& info : presets()) print("| `{}` | {} |\n", info.name, info.summary);
  flush_output();
  return 0;
}

}  // namespace

void add_policies(CLI::App& app, Action* action) {
  auto* command =
      app.add_subcommand("policies", "List the settings of all policies, and all presets");
  command->callback([action] { *action = [] { return run(); }; });
}

}  // namespace headroom::cli
