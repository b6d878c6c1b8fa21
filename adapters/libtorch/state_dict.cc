// The state of torch.amp.GradScaler.state_dict(). Does not use torch, so that the fuzzer can link
// it.
#include "state_dict.h"

#include <headroom/error.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace headroom::libtorch {
namespace {

constexpr const char* kScale = "scale";
constexpr const char* kGrowthFactor = "growth_factor";
constexpr const char* kBackoffFactor = "backoff_factor";
constexpr const char* kGrowthInterval = "growth_interval";
constexpr const char* kGrowthTracker = "_growth_tracker";

[[noreturn]] void bad(const std::string& sentence) { throw Error(ErrorCode::kBadState, sentence); }

// Both throw Error(kBadState) if the key is missing; integer_at() also if the value is no int32_t.
double number_at(const StateDict& state, const char* key) {
  const auto found = state.find(key);
  if (found == state.end()) bad(std::string("The scaler's state dict has no \"") + key + "\".");
  return found->second;
}

int32_t integer_at(const StateDict& state, const char* key) {
  const double value = number_at(state, key);
  const bool fits = value >= 0.0 && value <= std::numeric_limits<int32_t>::max();
  if (!fits || value != std::floor(value)) {
    bad(std::string("\"") + key + "\" in the scaler's state dict is " + std::to_string(value) +
        "; it must be an integer from 0 to 2147483647.");
  }
  return static_cast<int32_t>(value);
}

DynamicScale dynamic_rule(const ScalePolicy& policy) {
  if (const DynamicScale* const rule = policy.if_dynamic()) return *rule;
  throw Error(ErrorCode::kUnsupported,
              std::string("PyTorch's state dict describes the rule 'dynamic' only, and the policy "
                          "of this scaler has the rule '") +
                  to_string(policy.rule()) + "'; use save() and load().");
}

}  // namespace

// Integers are written without a decimal point, as Python expects them.
std::string to_json(const StateDict& state) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const char* key : {kScale, kGrowthFactor, kBackoffFactor}) {
    if (state.count(key) > 0) object[key] = state.at(key);
  }
  for (const char* key : {kGrowthInterval, kGrowthTracker}) {
    if (state.count(key) > 0) object[key] = integer_at(state, key);
  }
  return object.dump();
}

StateDict state_dict_from_json(const std::string& json) {
  const auto object = nlohmann::json::parse(json, nullptr, false);
  if (!object.is_object()) bad("The scaler's state dict is not a JSON object.");
  StateDict state;
  for (const auto& [key, value] : object.items()) {
    if (!value.is_number()) bad("\"" + key + "\" in the scaler's state dict is not a number.");
    state[key] = value.get<double>();
  }
  return state;
}

StateDict internal::to_state_dict(const ScaleRecord& scaler) {
  const DynamicScale rule = dynamic_rule(scaler.policy);
  return {{kScale, scaler.numbers.scale},
          {kGrowthFactor, rule.growth_factor},
          {kBackoffFactor, rule.backoff_factor},
          {kGrowthInterval, rule.growth_interval},
          {kGrowthTracker, std::max(scaler.numbers.dynamic.growth_tracker, 0)}};
}

// PyTorch's state dict always means a dynamic rule; settings that it does not have (bounds,
// hysteresis) stay those of the scaler. The range of the scale is checked by set_record().
internal::ScaleRecord internal::with_state_dict(const ScaleRecord& scaler, const StateDict& saved) {
  if (saved.empty()) {
    bad("The scaler's state dict is empty; the scaler that saved it may have been disabled.");
  }
  DynamicScale rule = dynamic_rule(scaler.policy);
  rule.growth_factor = number_at(saved, kGrowthFactor);
  rule.backoff_factor = number_at(saved, kBackoffFactor);
  rule.growth_interval = integer_at(saved, kGrowthInterval);
  try {
    validate(rule);
  } catch (const Error& error) {
    bad(std::string("The scaler's state dict cannot be used: ") + error.what());
  }
  ScaleRecord next{rule, scaler.numbers};
  next.numbers.scale = static_cast<float>(number_at(saved, kScale));
  next.numbers.dynamic.pending = next.numbers.scale;
  // When torch's interval is shortened, its count may exceed the new one.
  next.numbers.dynamic.growth_tracker =
      std::min(integer_at(saved, kGrowthTracker), rule.growth_interval - 1);
  return next;
}

}  // namespace headroom::libtorch
