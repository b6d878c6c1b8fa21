#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/inspect/inspection.h"
#include "cli/output.h"

namespace headroom::cli {
namespace {

using Json = nlohmann::ordered_json;

Json outcome_json(float scale, const Outcome& outcome, const Magnitudes& seen) {
  return {{"scale", scale_json(scale)},
          {"flushed", outcome.flushed},
          {"subnormal", outcome.subnormal},
          {"overflow", outcome.overflow},
          {"flushed_share", share(outcome.flushed, seen.count())},
          {"subnormal_share", share(outcome.subnormal, seen.count())},
          {"overflow_share", share(outcome.overflow, seen.count())},
          {"lost_share", share(outcome.flushed + outcome.overflow, seen.nonzero())}};
}

void add_counts(const Inspection& inspection, const Row& row, Json* json) {
  const Magnitudes& seen = row.magnitudes;
  (*json)["count"] = seen.count();
  (*json)["zeros"] = seen.zeros();
  (*json)["zeros_share"] = share(seen.zeros(), seen.count());
  (*json)["inf"] = seen.infs();
  (*json)["nan"] = seen.nans();
  (*json)["largest"] = seen.largest();
  (*json)["smallest"] = seen.smallest();
  (*json)["at_scale"] = outcome_json(inspection.scale(), inspection.outcome(row), seen);
  if (inspection.options.scale.has_value()) return;
  Json& scales = (*json)["scales"] = Json::array();
  const auto [first, last] = inspection.powers();
  for (int power = first; power <= last; ++power) {
    scales.push_back(
        outcome_json(std::ldexp(1.0f, power), seen.at(inspection.format, power), seen));
  }
}

const char* name_of(ScaleAdvice::Verdict verdict) {
  switch (verdict) {
    case ScaleAdvice::Verdict::kNothing:
      return "nothing";
    case ScaleAdvice::Verdict::kUnneeded:
      return "unneeded";
    case ScaleAdvice::Verdict::kScale:
      return "scale";
    case ScaleAdvice::Verdict::kNoneFits:
      return "none fits";
  }
  return "";
}

Json advice_json(const Inspection& inspection) {
  const ScaleAdvice& advice = inspection.advice;
  Json range = nullptr;
  if (advice.lowest > 0.0f) range = {scale_json(advice.lowest), scale_json(advice.highest)};
  return {{"verdict", name_of(advice.verdict)},
          {"scale", scale_json(advice.scale)},
          {"reason", advice.reason},
          {"range", range}};
}

}  // namespace

// Prints tensor by tensor, so that the JSON of thousands of tensors is never in memory at once.
void print_json(const Inspection& inspection) {
  Json total;
  add_counts(inspection, inspection.total, &total);
  print("{{\"format\":\"{}\",\"lose\":{},\"recommendation\":{},\"total\":{},\"tensors\":[",
        inspection.options.format, json_text(inspection.options.lose),
        json_text(advice_json(inspection)), json_text(total));
  for (size_t i = 0; i < inspection.rows.size(); ++i) {
    const Row& row = inspection.rows[i];
    Json tensor = {{"file", inspection.files[row.file].path},
                   {"name", row.name},
                   {"dtype", to_string(row.dtype)},
                   {"shape", row.shape}};
    add_counts(inspection, row, &tensor);
    print("{}{}", i == 0 ? "\n" : ",\n", json_text(tensor));
  }
  Json left_out = Json::array();
  for (const FileInfo& file : inspection.files) {
    for (const auto& [name, type] : file.left_out) {
      left_out.push_back({{"file", file.path}, {"name", name}, {"dtype", type}});
    }
  }
  print("],\n\"left_out\":{}}}\n", json_text(left_out));
}

}  // namespace headroom::cli
