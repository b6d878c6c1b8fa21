#include "cli/suggest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <headroom/error.h>

#include <algorithm>
#include <cctype>
#include <numeric>
#include <sstream>

namespace headroom::cli {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

// Insertions, deletions, replacements and swaps of neighbours that turn one word into the other.
size_t typing_errors(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) cost[i][0] = i;
  std::iota(cost[0].begin(), cost[0].end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1,
                             cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

// The part of "NAME:SETTING=VALUE,..." that parse_policy() does not know, and what it could be.
std::string unknown_part(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const std::vector<std::string> names = preset_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) return did_you_mean(name, names);
  std::vector<std::string> settings;
  for (const SettingInfo& info : policy_settings()) settings.emplace_back(info.name);
  size_t begin = colon == std::string::npos ? text.size() : colon + 1;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::string setting = entry.substr(0, entry.find('='));
    if (entry.find('=') != std::string::npos &&
        std::find(settings.begin(), settings.end(), setting) == settings.end()) {
      return did_you_mean(setting, settings);
    }
    begin = end + 1;
  }
  return "";
}

// The option that does not exist, or the word that is too many; empty if there is neither.
std::string unexpected_argument(const CLI::App& command, const std::string& help) {
  const std::vector<std::string> extra = command.remaining();
  for (const std::string& argument : extra) {
    if (!argument.starts_with('-') || argument.size() == 1) continue;
    const std::string name = argument.substr(0, argument.find('='));
    return fmt::format("There is no option '{}'.{} {} lists all.", name,
                       did_you_mean(name, option_names(command)), help);
  }
  if (extra.empty()) return "";
  return fmt::format("'{}' is one argument too many; {} shows what is expected.", extra[0], help);
}

// "a number", for the parser's "FLOAT".
std::string kind_of_value(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  if (type.starts_with("FLOAT")) return "a number";
  if (type.starts_with("UINT")) return "an integer of 0 or more";
  return type.starts_with("INT") ? "an integer" : "of another kind";
}

// Why the parser refused an option's value, from its error; empty if the error is not about it.
std::string refused_value(const CLI::Option& option, const std::string& kind,
                          const std::string& what, const std::string& help) {
  const std::string name = option.get_name();
  const auto begins = [&](const std::string& text) { return what.starts_with(text); };
  const size_t given = option.results().size();
  if (kind == "RequiredError" && begins(name + " is")) {
    return fmt::format("The argument '{}' is missing; {} describes it.", name, help);
  }
  if (kind == "ConversionError" && begins("Could not convert: " + name + " = ")) {
    if (option.get_items_expected_max() == 0) return fmt::format("{} takes no value.", name);
    return fmt::format("{} is '{}'; it must be {}.", name, fmt::join(option.results(), " "),
                       kind_of_value(option));
  }
  if (kind == "RequiresError" && begins(name + " requires ")) {
    return fmt::format("{} needs {}.", name, what.substr(name.size() + 10));
  }
  if (kind == "ExcludesError" && begins(name + " excludes ")) {
    return fmt::format("{} and {} cannot be used together.", name, what.substr(name.size() + 10));
  }
  if (!begins(name + ": ")) return "";
  const std::string problem = what.substr(name.size() + 2);
  if (kind == "ArgumentMismatch") {
    return given > 1 ? fmt::format("{} was given {} times; give it once.", name, given)
                     : fmt::format("{} needs a value; {} describes it.", name, help);
  }
  if (kind != "ValidationError") return "";
  // The parser's own sentence, or that of not_one_of().
  constexpr std::string_view kValue = "Value ", kRange = " not in range ";
  const size_t range = problem.find(kRange);
  std::string to;
  if (problem.starts_with(kValue) && range != std::string::npos) {
    double least = 0.0, most = 0.0;
    std::istringstream(problem.substr(range + kRange.size())) >> least >> to >> most;
    return fmt::format("{} is {}; it must be from {} to {}.", name,
                       problem.substr(kValue.size(), range - kValue.size()), least, most);
  }
  return problem.starts_with("it is ") ? name + problem.substr(2) : what;
}

}  // namespace

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 64;  // of words that are compared
  if (word.empty() || word.size() > kLongest) return "";
  const std::string wanted = lower(word);
  const std::string* best = nullptr;
  size_t fewest = wanted.size() <= 4 ? 1 : 2;
  for (const std::string& candidate : candidates) {
    const size_t errors = typing_errors(wanted, lower(candidate));
    if (errors < fewest || (errors == fewest && best == nullptr)) {
      fewest = errors;
      best = &candidate;
    }
  }
  if (best == nullptr && wanted.size() >= 3) {
    const auto continued = [&](const std::string& name) { return lower(name).starts_with(wanted); };
    const auto first = std::find_if(candidates.begin(), candidates.end(), continued);
    if (first != candidates.end()) best = &*first;
  }
  return best == nullptr ? "" : fmt::format(" Did you mean '{}'?", *best);
}

std::string not_one_of(std::string_view option, std::string_view value,
                       const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return "";
  return fmt::format("{} is '{}'; it must be one of {}.{}", option, value, fmt::join(allowed, ", "),
                     did_you_mean(value, allowed));
}

CLI::Validator one_of(const std::vector<std::string>& allowed) {
  return {[=](std::string& value) { return not_one_of("it", value, allowed); },
          fmt::format("{{{}}}", fmt::join(allowed, ","))};
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const PresetInfo& info : presets()) names.emplace_back(info.name);
  return names;
}

ScalePolicy parse_policy_helpfully(const std::string& text) {
  try {
    return parse_policy(text);
  } catch (const Error& error) {
    throw Error(error.code(), error.what() + unknown_part(text));
  }
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names = {"help"};
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::string unknown_command(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0].starts_with('-')) return "";
  const std::vector<std::string> names = command_names(app);
  if (std::find(names.begin(), names.end(), arguments[0]) != names.end()) return "";
  return fmt::format("'{}' is not a command.{} 'headroom --help' lists all.", arguments[0],
                     did_you_mean(arguments[0], names));
}

std::string mistake_in_arguments(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<CLI::App*> commands = app.get_subcommands();
  const CLI::App& command = commands.empty() ? app : *commands[0];
  const std::string help =
      fmt::format("'headroom{} --help'", commands.empty() ? "" : " " + command.get_name());
  std::string unexpected = unexpected_argument(command, help);
  if (!unexpected.empty()) return unexpected;
  if (commands.empty()) return fmt::format("No command was given; {} lists all.", help);
  const std::string what = error.what();
  for (const CLI::Option* option : command.get_options()) {
    std::string sentence = refused_value(*option, error.get_name(), what, help);
    if (!sentence.empty()) return sentence;
  }
  return fmt::format("{}; {} describes all options.", what, help);
}

}  // namespace headroom::cli
