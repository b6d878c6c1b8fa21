// Errors that name what the user may have meant.
#ifndef HEADROOM_CLI_SUGGEST_H_
#define HEADROOM_CLI_SUGGEST_H_

#include <headroom/policy.h>

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace headroom::cli {

/// " Did you mean 'train'?" if a candidate differs from the word by case, by one or two typing
/// errors, or continues it; otherwise an empty text.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// "--precision is 'FP16'; it must be one of fp16, bf16. Did you mean 'fp16'?", or an empty text if
/// the value is allowed.
std::string not_one_of(std::string_view option, std::string_view value,
                       const std::vector<std::string>& allowed);

/// A check of the parser that allows these values.
CLI::Validator one_of(const std::vector<std::string>& allowed);

/// The names of all presets.
std::vector<std::string> preset_names();

/// parse_policy(); its errors name presets and settings that resemble the text.
ScalePolicy parse_policy_helpfully(const std::string& text);

/// The names of all commands.
std::vector<std::string> command_names(const CLI::App& app);

/// The options of a command, such as "--out".
std::vector<std::string> option_names(const CLI::App& command);

/// Why the first argument is not a command, or an empty text if it is one, or an option.
std::string unknown_command(const CLI::App& app, const std::vector<std::string>& arguments);

/// One sentence: why the parser refused the arguments, and what to do.
std::string mistake_in_arguments(const CLI::App& app, const CLI::ParseError& error);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_SUGGEST_H_
