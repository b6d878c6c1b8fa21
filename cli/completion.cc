#include "cli/completion.h"

#include <map>
#include <memory>

#include "cli/output.h"
#include "cli/suggest.h"

namespace headroom::cli {
namespace {

constexpr const char* kCandidates = "candidates";

constexpr const char* kBash = R"sh(# eval "$(headroom completion bash)"
_headroom() {
  local words
  words=$("$1" completion candidates "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _headroom headroom
)sh";

constexpr const char* kZsh = R"sh(#compdef headroom
# eval "$(headroom completion zsh)"
_headroom() {
  local -a found
  found=(${(f)"$($words[1] completion candidates "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _headroom headroom
)sh";

constexpr const char* kFish = R"sh(# headroom completion fish | source
function __headroom_candidates
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion candidates $words[2..-1] 2>/dev/null
end
complete -c headroom -a '(__headroom_candidates)'
)sh";

const std::map<std::string, const char*>& scripts() {
  static const std::map<std::string, const char*> kScripts = {
      {"bash", kBash}, {"fish", kFish}, {"zsh", kZsh}};
  return kScripts;
}

std::vector<std::string> values_of(const std::string& option) {
  static const std::map<std::string, std::vector<std::string>> kValues = {
      {"--precision", {"fp16", "bf16", "fp32"}},
      {"--opt-level", {"O0", "O1", "O2", "O3"}},
      {"--optimizer", {"sgd", "adam", "adamw"}},
      {"--schedule", {"cosine", "constant"}},
      {"--fake-quant", {"int8"}},
      {"--device", {"cpu", "cuda"}},
      {"--escape", {"bf16", "fp32"}},
      {"--format", {"fp16", "bf16", "e5m2", "e4m3"}},
      {"--model", {"field", "lm", "mlp", "cnn", "gpt"}},
  };
  if (option == "--loss-scale" || option == "--policy") return preset_names();
  const auto found = kValues.find(option);
  return found == kValues.end() ? std::vector<std::string>() : found->second;
}

}  // namespace

bool asks_for_candidates(const std::vector<std::string>& arguments) {
  return arguments.size() >= 3 && arguments[0] == "completion" && arguments[1] == kCandidates;
}

std::vector<std::string> candidates(const CLI::App& app, const std::vector<std::string>& words) {
  const bool first = words.size() <= 1;
  if (first || (words[0] == "help" && words.size() == 2)) return command_names(app);
  if (words[0] == "completion") return {"bash", "zsh", "fish"};
  const auto named = [&](const CLI::App* command) { return command->get_name() == words[0]; };
  const std::vector<const CLI::App*> found = app.get_subcommands(named);
  if (found.empty()) return {};
  if (words.back().starts_with('-')) return option_names(*found[0]);
  const std::string& previous = words[words.size() - 2];
  if (previous.starts_with('-')) return values_of(previous);
  const bool trains = words[0] == "train" || words[0] == "compare";
  return trains ? values_of("--model") : std::vector<std::string>();
}

void add_completion(CLI::App& app, Action* action) {
  const auto shell = std::make_shared<std::string>();
  CLI::App* const command = app.add_subcommand("completion", "Print completion for a shell");
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(one_of({"bash", "zsh", "fish"}));
  command->callback([=] {
    *action = [=] {
      print_text(scripts().at(*shell));
      return 0;
    };
  });
}

}  // namespace headroom::cli
