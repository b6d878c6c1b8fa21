// ScaleState, and its JSON form: numbers are written exactly; on reading, every key is required and
// unknown keys are refused, so that a truncated or foreign file is never accepted.
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <type_traits>

#include "core/check.h"
#include "decide/settings.h"
#include "decide/transition.h"

namespace headroom {
namespace {

using internal::ScaleNumbers;
using internal::ScaleRecord;
using nlohmann::json;

constexpr const char* kFormat = "headroom-scaler";
constexpr int kVersion = 4;  // incremented when keys or their meaning change

[[noreturn]] void bad(const std::string& sentence) { throw Error(ErrorCode::kBadState, sentence); }

// A visitor that writes members by name, for PolicySettings::visit() and visit_numbers().
class Writer {
 public:
  explicit Writer(json* object) : object_(*object) {}
  template <typename T>
  void operator()(const char* key, const T& value) const {
    object_[key] = value;
  }
  void operator()(const char* key, OnOverflow value) const { object_[key] = word_of(value); }
  template <typename T>
  void operator()(const Setting& setting, const T& value) const {
    (*this)(setting.name, value);
  }

 private:
  json& object_;
};

// The visitor that reads them back, checking the type of each. Collects the keys in `read`.
class Reader {
 public:
  Reader(const json& object, const char* where, std::set<std::string>* read)
      : object_(object), where_(where), read_(*read) {}

  template <typename T>
  void operator()(const char* key, T& value) const {
    const json& found = at(key);
    if constexpr (std::is_same_v<T, bool>) {
      if (!found.is_boolean()) wrong(key, "true or false");
      value = found.get<bool>();
    } else if constexpr (std::is_same_v<T, OnOverflow>) {
      if (found != "skip" && found != "throw") wrong(key, "\"skip\" or \"throw\"");
      value = found == "throw" ? OnOverflow::kThrow : OnOverflow::kSkip;
    } else if constexpr (std::is_integral_v<T>) {
      // Compared as a double: a json number above 2^63 is unsigned and would wrap.
      const double limit = sizeof(T) == sizeof(int32_t) ? 0x1p31 : 0x1p63;
      const bool fits = found.is_number_integer() && std::fabs(found.get<double>()) < limit;
      if (!fits) wrong(key, sizeof(T) == sizeof(int32_t) ? "a 32-bit integer" : "an integer");
      value = found.get<T>();
    } else {
      // The comparison is false for NaN and inf, too.
      const bool fits =
          found.is_number() && std::fabs(found.get<double>()) <= std::numeric_limits<T>::max();
      if (!fits)
        wrong(key, sizeof(T) == sizeof(float) ? "a finite FP32 number" : "a finite number");
      value = static_cast<T>(found.get<double>());
    }
  }
  template <typename T>
  void operator()(const Setting& setting, T& value) const {
    (*this)(setting.name, value);
  }

 private:
  const json& at(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) {
      bad(std::string("The saved scaler has no '") + key + "' in its " + where_ +
          "; it is incomplete.");
    }
    read_.insert(key);
    return *found;
  }
  [[noreturn]] void wrong(const char* key, const char* rule) const {
    bad(std::string("'") + key + "' in the saved scaler's " + where_ + " has to be " + rule + ".");
  }

  const json& object_;
  const char* where_;
  std::set<std::string>& read_;
};

const json& object_at(const json& root, const char* key) {
  const auto found = root.find(key);
  if (found == root.end() || !found->is_object()) {
    bad(std::string("The saved scaler has no '") + key + "' object; it is incomplete.");
  }
  return *found;
}

// Refuses keys that no visitor has read.
void check_no_others(const json& object, const std::set<std::string>& known, const char* where) {
  for (const auto& item : object.items()) {
    if (!known.contains(item.key())) {
      bad("The saved scaler has an unknown '" + item.key() + "' in its " + where +
          "; it comes from another version or program.");
    }
  }
}

// The root object, with format, version and keys checked.
json parse(std::string_view text) {
  json root = json::parse(text, nullptr, false);
  if (root.is_discarded() || !root.is_object()) {
    bad("The saved scaler is not a JSON object: the file is damaged, or is not from "
        "GradScaler::save(); load another checkpoint.");
  }
  const auto format = root.find("format");  // value() would copy, and recurse into nested input
  if (format == root.end() || *format != kFormat) {
    bad(std::string("The saved scaler has no \"format\": \"") + kFormat +
        "\"; it is not from GradScaler::save().");
  }
  const auto version = root.find("version");
  if (version == root.end() || *version != kVersion) {
    bad("The saved scaler has version " +
        (version != root.end() && version->is_number() ? version->dump() : "none") +
        "; this library reads version " + std::to_string(kVersion) +
        ". Use the version of Headroom that saved it.");
  }
  check_no_others(root, {"format", "version", "policy", "state"}, "top level");
  return root;
}

// Errors of validate() become Error(kBadState): the caller has passed a bad file, not a bad policy.
ScalePolicy read_policy(const json& object) {
  const auto rule = object.find("rule");
  ScalePolicy policy;
  if (rule != object.end() && *rule == "static") {
    policy = StaticScale{};
  } else if (rule != object.end() && *rule == "headroom") {
    policy = HeadroomScale{};
  } else if (rule == object.end() || *rule != "dynamic") {
    bad("'rule' in the saved scaler's policy has to be \"static\", \"dynamic\" or \"headroom\".");
  }
  std::set<std::string> read = {"rule"};
  PolicySettings::visit(policy, Reader(object, "policy", &read));
  check_no_others(object, read, "policy");
  try {
    validate(policy);
  } catch (const Error& error) {
    bad(std::string("The saved policy is invalid: ") + error.what());
  }
  return policy;
}

}  // namespace

// A scaler must never get numbers that its rule cannot reach: they could break the rule's own
// invariants later.
void internal::check_numbers(const ScalePolicy& policy, const ScaleNumbers& numbers) {
  const auto check = [](bool ok, const char* what, double value, const char* rule) {
    if (!ok) {
      bad(std::string("The saved ") + what + " is " + number(value) + "; it has to be " + rule +
          ".");
    }
  };
  const char* const bounds = policy.if_headroom() != nullptr
                                 ? "a power of two within min_scale and max_scale"
                                 : "within min_scale and max_scale";
  const auto wide = [](int64_t value) { return static_cast<double>(value); };
  check(policy.allows(numbers.scale), "scale", numbers.scale, bounds);
  check(numbers.steps >= 0 && numbers.steps <= internal::kMaxCount, "steps", wide(numbers.steps),
        "0 or more, and a number that training can reach");
  check(numbers.skipped >= 0 && numbers.skipped <= numbers.steps, "skipped", wide(numbers.skipped),
        "from 0 to steps");
  check(numbers.skips_in_row >= 0 && numbers.skips_in_row <= numbers.skipped, "skips_in_row",
        wide(numbers.skips_in_row), "from 0 to skipped");
  if (const HeadroomScale* const rule = policy.if_headroom()) {
    if (!valid(*rule, numbers.headroom)) {
      bad("The saved state of the headroom rule is invalid; load an earlier checkpoint.");
    }
  }
  const DynamicScale* const rule = policy.if_dynamic();
  if (rule == nullptr) return;
  const internal::DynamicMemory& memory = numbers.dynamic;
  check(policy.allows(memory.pending), "pending", memory.pending, bounds);
  check(rule->late || memory.pending == numbers.scale, "pending", memory.pending,
        "equal to scale, because this policy is not a late one");
  check(memory.growth_tracker >= -std::max(rule->first_growth_extra, rule->next_growth_extra) &&
            memory.growth_tracker < rule->growth_interval,
        "growth_tracker", memory.growth_tracker, "below growth_interval and not negative");
  check(memory.delay_left >= 1 && memory.delay_left <= rule->hysteresis, "delay_left",
        memory.delay_left, "from 1 to hysteresis");
  check(memory.since_rescale >= 0 && memory.since_rescale <= numbers.steps, "since_rescale",
        wide(memory.since_rescale), "from 0 to steps");
  check(memory.overflows_since_rescale >= 0 && memory.overflows_since_rescale <= numbers.skipped,
        "overflows_since_rescale", wide(memory.overflows_since_rescale), "from 0 to skipped");
}

ScaleState::ScaleState(const ScalePolicy& policy) {
  validate(policy);
  record_ = std::make_shared<ScaleRecord>(ScaleRecord{policy, internal::initial_numbers(policy)});
}
ScaleState::ScaleState(const ScaleRecord& record)
    : record_(std::make_shared<ScaleRecord>(record)) {}

float ScaleState::scale() const { return record_->numbers.scale; }
int64_t ScaleState::steps() const { return record_->numbers.steps; }
int64_t ScaleState::skipped() const { return record_->numbers.skipped; }
int64_t ScaleState::skips_in_row() const { return record_->numbers.skips_in_row; }
const ScalePolicy& ScaleState::policy() const { return record_->policy; }
bool ScaleState::retry() const { return internal::retry(record_->policy, record_->numbers); }

// Copies of a ScaleState share their record, which therefore never changes in place.
Alarm ScaleState::advance(const StepSeen& seen) {
  ScaleRecord next = *record_;
  const Alarm alarm = internal::advance(next.policy, seen, &next.numbers);
  record_ = std::make_shared<ScaleRecord>(next);
  return alarm;
}

// The saved text is exact and complete.
bool operator==(const ScaleState& a, const ScaleState& b) { return a.save() == b.save(); }

std::string ScaleState::save() const {
  json root = {{"format", kFormat}, {"version", kVersion}};
  root["policy"] = json{{"rule", to_string(record_->policy.rule())}};
  root["state"] = json::object();
  PolicySettings::visit(record_->policy, Writer(&root["policy"]));
  internal::visit_numbers(record_->policy.rule(), record_->numbers, Writer(&root["state"]));
  return root.dump(2);
}

ScaleState ScaleState::load(std::string_view text) {
  const json root = parse(text);
  const ScalePolicy policy = read_policy(object_at(root, "policy"));
  ScaleNumbers numbers = internal::initial_numbers(policy);
  std::set<std::string> read;
  const json& saved = object_at(root, "state");
  internal::visit_numbers(policy.rule(), numbers, Reader(saved, "state", &read));
  check_no_others(saved, read, "state");
  if (policy.if_dynamic() == nullptr) numbers.dynamic.pending = numbers.scale;  // not saved
  internal::check_numbers(policy, numbers);
  return ScaleState(ScaleRecord{policy, numbers});
}

}  // namespace headroom
