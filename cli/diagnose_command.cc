#include <fmt/format.h>
#include <headroom/diagnose.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/diagnose.h"
#include "cli/output.h"
#include "diagnose/rules.h"

namespace headroom::cli {
namespace {

struct DiagnoseOptions {
  std::string folder;
  bool json = false;
  bool rules = false;
};

// A table in Markdown, which docs/diagnose.md has.
void print_rules() {
  print("| rule | reported if | advises |\n|---|---|---|\n");
  for (const DiagnosisRule& rule : diagnosis_rules()) {
    print("| `{}` | {} | {} |\n", rule.id, rule.when, rule.cure);
  }
}

void print_diagnoses_json(const std::string& folder) {
  std::vector<std::string> left_out;
  nlohmann::ordered_json runs = nlohmann::ordered_json::array();
  for (const Diagnosis& diagnosis : diagnose(folder, &left_out)) {
    nlohmann::ordered_json run = {{"place", diagnosis.place}, {"name", diagnosis.name}};
    run.update(internal::diagnosis_json(diagnosis));
    runs.push_back(std::move(run));
  }
  print("{}\n", json_text({{"runs", runs}, {"left_out", left_out}}));
}

int run(const DiagnoseOptions& options) {
  if (options.rules) {
    print_rules();
  } else if (options.json) {
    print_diagnoses_json(options.folder);
  } else {
    print_left_out(print_diagnoses(options.folder));
  }
  return 0;
}

}  // namespace

std::vector<std::string> print_diagnoses(const std::string& folder) {
  std::vector<std::string> left_out;
  const std::vector<Diagnosis> diagnoses = diagnose(folder, &left_out);
  const int width = terminal_width(STDOUT_FILENO);
  for (const Diagnosis& diagnosis : diagnoses) {
    if (diagnoses.size() > 1) {
      print("{}{} ({})\n", &diagnosis == diagnoses.data() ? "" : "\n",
            internal::printable_line(diagnosis.name), internal::printable_line(diagnosis.place));
    }
    print_text(diagnosis.to_string(width));
  }
  return left_out;
}

void add_diagnose(CLI::App& app, Action* action) {
  const auto options = std::make_shared<DiagnoseOptions>();
  CLI::App* const command = app.add_subcommand(
      "diagnose", "Say what is wrong with the loss scaling of a run, and what to change");
  CLI::Option* const folder = command->add_option(
      "dir", options->folder, "folder with a history.jsonl, or with such folders below it");
  CLI::Option* const rules =
      command->add_flag("--rules", options->rules, "list the rules instead of a run");
  command->add_flag("--json", options->json, "print one JSON object")->excludes(rules);
  command->callback([=] {
    if (!options->rules && folder->empty()) throw CLI::RequiredError("dir");
    *action = [=] { return run(*options); };
  });
}

}  // namespace headroom::cli
