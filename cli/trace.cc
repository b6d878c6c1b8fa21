#include "cli/trace.h"

#include <fmt/format.h>
#include <headroom/error.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "record/history.h"

namespace headroom::cli {
namespace {

std::string_view trim(std::string_view text) {
  constexpr const char* kSpace = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

[[noreturn]] void bad_line(const std::string& name, size_t line, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{}:{}: {}", name, line, why));
}

// What was found, short enough to print and without control characters.
std::string quoted(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, 40)) shown += c >= ' ' && c < 127 ? c : '?';
  return "'" + shown + (text.size() > 40 ? "...'" : "'");
}

bool overflow_of(const nlohmann::json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer() && (value == 0 || value == 1)) return value == 1;
  throw std::invalid_argument("not a flag");
}

}  // namespace

std::vector<bool> read_trace(std::istream& in, const std::string& name) {
  std::vector<bool> steps;
  std::string text;
  bool history = false;  // of a run: has other lines between its steps
  for (size_t line = 1; std::getline(in, text); ++line) {
    const std::string_view content = trim(text);
    if (content.empty() || content.front() == '#') continue;
    if (content == "0" || content == "1") {
      steps.push_back(content == "1");
      continue;
    }
    const auto object = nlohmann::json::parse(content, nullptr, false);
    if (!object.is_object()) {
      bad_line(name, line, fmt::format("{} is neither 0, 1 nor a JSON object.", quoted(content)));
    }
    if (object.value("format", nlohmann::json()) == internal::kHistoryFormat) history = true;
    const auto overflow = object.find("overflow");
    if (history && overflow == object.end()) continue;
    if (overflow == object.end()) bad_line(name, line, "the object has no \"overflow\".");
    try {
      steps.push_back(overflow_of(*overflow));
    } catch (const std::invalid_argument&) {
      bad_line(name, line, "\"overflow\" has to be true, false, 0 or 1.");
    }
  }
  if (in.bad()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} could not be read to its end.", name));
  }
  return steps;
}

std::vector<bool> read_trace_file(const std::string& path) {
  if (path == "-") return read_trace(std::cin, "standard input");
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("Trace '{}' cannot be opened: {}.", path, std::strerror(errno)));
  }
  return read_trace(file, path);
}

}  // namespace headroom::cli
