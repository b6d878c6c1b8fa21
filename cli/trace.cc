#include "cli/trace.h"

#include <fmt/format.h>
#include <headroom/error.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "files/file.h"
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

// Reads the next line without its newline; false at the end. Stops after kLongestLine bytes, which
// is enough for the caller to refuse the line.
bool read_line(std::istream& in, std::string* line) {
  char piece[4096];
  line->clear();
  for (;;) {
    in.getline(piece, sizeof piece);
    const auto got = static_cast<size_t>(in.gcount());
    const bool ended = in.good();  // gcount() includes the newline
    line->append(piece, ended ? got - 1 : got);
    const bool full = in.fail() && got > 0;  // the buffer was full before the line ended
    if (!full) return !in.fail() || !line->empty();
    in.clear(in.rdstate() & ~std::ios::failbit);
    if (line->size() > internal::kLongestLine) return true;
  }
}

constexpr int kLargestExponent = 1100;  // above those of all formats

// Converts an object to a step. Throws std::invalid_argument with an error sentence.
TraceStep step_of(const nlohmann::json& object) {
  TraceStep step;
  const auto positive = [&](const char* key, double* value) {
    const auto found = object.find(key);
    if (found == object.end() || found->is_null()) return false;
    if (!found->is_number() || !std::isfinite(found->get<double>()) || found->get<double>() < 0) {
      throw std::invalid_argument(fmt::format("\"{}\" must be a number, 0 or more.", key));
    }
    *value = found->get<double>();
    return true;
  };
  const bool by_scale = positive("overflow_at", &step.overflow_at) && step.overflow_at > 0.0;
  const bool measured = positive("amax", &step.amax);
  const auto overflow = object.find("overflow");
  if (overflow == object.end() && !by_scale && !measured) {
    throw std::invalid_argument("the object has no \"overflow\" and no \"amax\".");
  }
  if (overflow != object.end()) {
    const bool flag = overflow->is_boolean() || *overflow == 0 || *overflow == 1;
    if (!flag) throw std::invalid_argument("\"overflow\" must be true, false, 0 or 1.");
    step.overflow = !by_scale && (*overflow == true || *overflow == 1);
  }
  const auto log2 = object.find("log2");
  if (log2 == object.end()) return step;
  if (!log2->is_object()) throw std::invalid_argument("\"log2\" must be an object.");
  for (const auto& [exponent, count] : log2->items()) {
    int e = 0;
    const char* const end = exponent.data() + exponent.size();
    const auto parsed = std::from_chars(exponent.data(), end, e);
    const bool whole =
        parsed.ec == std::errc() && parsed.ptr == end && std::abs(e) <= kLargestExponent;
    if (!whole || !count.is_number_unsigned() || count > int64_t{1} << 48) {
      throw std::invalid_argument("\"log2\" must map exponents to counts.");
    }
    step.log2.emplace_back(e, count.get<int64_t>());
  }
  return step;
}

// The sum of the histograms of all layers in a history's snapshot, unscaled. Empty if it is
// invalid.
Log2Counts snapshot_of(const nlohmann::json& object) {
  std::map<int, int64_t> counts;
  try {
    const double scale = object.at("scale").get<double>();
    if (!std::isfinite(scale) || scale <= 0.0) return {};
    const int shift = std::ilogb(scale);
    for (const nlohmann::json& layer : object.at("layers")) {
      const nlohmann::json& from = layer.at("from");
      const nlohmann::json& histogram = layer.at("histogram");
      const bool valid = from.is_number_integer() && from >= -kLargestExponent &&
                         from <= kLargestExponent && histogram.size() <= kLargestExponent;
      if (!valid) return {};
      for (size_t i = 0; i < histogram.size(); ++i) {
        const auto count = histogram[i].is_number_unsigned() ? histogram[i].get<int64_t>() : -1;
        if (count < 0) return {};  // also if it was above 2^63
        int64_t& sum = counts[from.get<int>() + static_cast<int>(i) - shift];
        sum = saturating_sum(sum, count);
      }
    }
  } catch (const nlohmann::json::exception&) {
    return {};
  }
  return {counts.begin(), counts.end()};
}

}  // namespace

int64_t saturating_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

StepSeen TraceStep::at(float scale) const {
  constexpr double kRoundsToInf = 65520.0;
  const double scaled = amax * static_cast<double>(scale);
  const bool inside = overflow_at > 0.0 && static_cast<double>(scale) >= overflow_at;
  if (overflow || inside || scaled >= kRoundsToInf) return {true, 0.0};
  return {false, scaled};
}

int64_t TraceStep::values() const {
  int64_t sum = 0;
  for (const auto& [exponent, count] : log2) sum = saturating_sum(sum, count);
  return sum;
}

int64_t TraceStep::lost_at(float scale) const {
  constexpr int kRoundsToZero = -25;  // half of FP16's smallest number
  const int shift = std::ilogb(scale);
  int64_t sum = 0;
  for (const auto& [exponent, count] : log2) {
    if (exponent + shift < kRoundsToZero) sum = saturating_sum(sum, count);
  }
  return sum;
}

std::vector<TraceStep> read_trace(std::istream& in, const std::string& name, bool* cut) {
  std::vector<TraceStep> steps;
  std::string text;
  bool history = false;  // the history of a run, which has other lines between its steps
  Log2Counts snapshot;   // of the layers, for the next step
  for (size_t line = 1; read_line(in, &text); ++line) {
    const std::string_view content = trim(text);
    if (content.empty() || content.front() == '#') continue;
    if (content == "0" || content == "1") {
      steps.emplace_back().overflow = content == "1";
      continue;
    }
    const std::string exceeded = internal::exceeded_limit(content);
    if (!exceeded.empty()) bad_line(name, line, fmt::format("this line {}.", exceeded));
    const auto object = nlohmann::json::parse(content, nullptr, false);
    if (!object.is_object()) {
      if (history && in.eof()) {  // the writer was killed or is still writing
        if (cut != nullptr) *cut = true;
        break;
      }
      bad_line(name, line,
               fmt::format("{} is neither 0, 1 nor a JSON object.", files::in_quotes(content)));
    }
    const auto format = object.find("format");
    if (format != object.end() && *format == internal::kHistoryFormat) history = true;
    if (history && object.contains("layers")) snapshot = snapshot_of(object);
    if (history && !object.contains("overflow")) continue;
    // The output of `replay --json` marks passes that were retried with true; histories have a
    // number.
    const auto retries = object.find("retries");
    if (retries != object.end() && *retries == true) continue;
    try {
      steps.push_back(step_of(object));
      if (steps.back().log2.empty()) steps.back().log2 = std::move(snapshot);
      snapshot.clear();
    } catch (const std::invalid_argument& error) {
      bad_line(name, line, error.what());
    }
  }
  if (in.bad()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} could not be read completely.", name));
  }
  return steps;
}

std::vector<TraceStep> read_trace_file(const std::string& path, bool* cut) {
  if (path == "-") return read_trace(std::cin, "standard input", cut);
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("Trace '{}' cannot be opened: {}.", path, std::strerror(errno)));
  }
  return read_trace(file, path, cut);
}

}  // namespace headroom::cli
