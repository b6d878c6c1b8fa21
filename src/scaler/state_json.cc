// A scaler's policy and state as JSON: every number exact, every key required.
#include <headroom/scaler.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"
#include "scaler/members.h"

namespace headroom {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "headroom-scaler";
// What earlier versions did not have yet is read as its default, which is what they meant.
constexpr int kVersion = internal::kStateVersion;

[[noreturn]] void bad(const std::string& sentence) { throw Error(ErrorCode::kBadState, sentence); }

class Writer {
 public:
  explicit Writer(json* object) : object_(*object) {}
  template <typename T>
  void operator()(const char* key, const T& value) const {
    object_[key] = value;
  }
  void operator()(const char* key, OnOverflow value) const {
    object_[key] = value == OnOverflow::kThrow ? "throw" : "skip";
  }

 private:
  json& object_;
};

class Reader {
 public:
  Reader(const json& object, const char* where, std::set<std::string>* read)
      : object_(object), where_(where), read_(*read) {}

  void operator()(const char* key, bool& value) const {
    const json& found = at(key);
    if (!found.is_boolean()) wrong(key, "true or false");
    value = found.get<bool>();
  }
  void operator()(const char* key, double& value) const { value = finite(key); }
  void operator()(const char* key, float& value) const {
    const double number = finite(key);
    if (std::fabs(number) > std::numeric_limits<float>::max()) wrong(key, "a number that FP32 has");
    value = static_cast<float>(number);
  }
  void operator()(const char* key, int32_t& value) const {
    const int64_t number = integer(key);
    if (number != static_cast<int32_t>(number)) wrong(key, "a 32-bit integer");
    value = static_cast<int32_t>(number);
  }
  void operator()(const char* key, int64_t& value) const { value = integer(key); }
  void operator()(const char* key, int32_t (&values)[kLevels]) const {
    const json& found = at(key);
    bool fits = found.is_array() && found.size() == kLevels;
    for (int i = 0; fits && i < kLevels; ++i) {
      fits = found[i].is_number_integer() && found[i] >= 0 && found[i] <= internal::kMaxWait;
      if (fits) values[i] = found[i].get<int32_t>();
    }
    if (!fits) wrong(key, "an array of 32 numbers of steps");
  }
  void operator()(const char* key, OnOverflow& value) const {
    const json& found = at(key);
    if (found != "skip" && found != "throw") wrong(key, "\"skip\" or \"throw\"");
    value = found == "throw" ? OnOverflow::kThrow : OnOverflow::kSkip;
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
  double finite(const char* key) const {
    const json& found = at(key);
    if (!found.is_number() || !std::isfinite(found.get<double>())) wrong(key, "a finite number");
    return found.get<double>();
  }
  int64_t integer(const char* key) const {
    const json& found = at(key);
    const bool fits =
        found.is_number_integer() &&
        !(found.is_number_unsigned() &&
          found.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
    if (!fits) wrong(key, "an integer");
    return found.get<int64_t>();
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

void check_no_others(const json& object, const std::set<std::string>& known, const char* where) {
  for (const auto& item : object.items()) {
    if (!known.contains(item.key())) {
      bad("The saved scaler has an unknown '" + item.key() + "' in its " + where +
          "; it comes from another version or program.");
    }
  }
}

json parse(std::string_view text) {
  json root = json::parse(text, nullptr, false);
  if (root.is_discarded() || !root.is_object()) {
    bad("The saved scaler is not a JSON object; it is damaged or something else.");
  }
  const auto format = root.find("format");  // not value(), which copies what may be deep
  if (format == root.end() || *format != kFormat) {
    bad(std::string("The saved scaler does not say \"format\": \"") + kFormat +
        "\"; it is something else.");
  }
  const auto version = root.find("version");
  if (version == root.end() || !version->is_number_integer() || *version < 1 ||
      *version > kVersion) {
    bad("The saved scaler has another version than 1 to " + std::to_string(kVersion) +
        ", those that this library reads.");
  }
  check_no_others(root, {"format", "version", "policy", "state"}, "top level");
  return root;
}

void check_state(const ScalePolicy& policy, const ScaleState& state) {
  const auto check = [](bool ok, const char* what, double value, const char* rule) {
    if (!ok) {
      bad(std::string("The saved ") + what + " is " + internal::number(value) + "; it has to be " +
          rule + ".");
    }
  };
  const char* const bounds = policy.grad_limit > 0.0f
                                 ? "a power of two within min_scale and max_scale"
                                 : "within min_scale and max_scale";
  const auto wide = [](int64_t value) { return static_cast<double>(value); };
  check(allows(policy, state.scale), "scale", state.scale, bounds);
  check(allows(policy, state.pending), "pending", state.pending, bounds);
  check(policy.late || state.pending == state.scale, "pending", state.pending,
        "equal to scale, because this policy is not a late one");
  check(state.growth_tracker >= -std::max(policy.first_growth_extra, policy.next_growth_extra) &&
            state.growth_tracker < policy.growth_interval,
        "growth_tracker", state.growth_tracker, "below growth_interval and not negative");
  check(state.delay_left >= 1 && state.delay_left <= policy.hysteresis, "delay_left",
        state.delay_left, "from 1 to hysteresis");
  check(state.steps >= 0 && state.steps <= internal::kMaxCount, "steps", wide(state.steps),
        "0 or more, and a number that training can reach");
  check(state.skipped >= 0 && state.skipped <= state.steps, "skipped", wide(state.skipped),
        "from 0 to steps");
  check(state.skips_in_row >= 0 && state.skips_in_row <= state.skipped, "skips_in_row",
        wide(state.skips_in_row), "from 0 to skipped");
  check(state.since_rescale >= 0 && state.since_rescale <= state.steps, "since_rescale",
        wide(state.since_rescale), "from 0 to steps");
  check(state.overflows_since_rescale >= 0 && state.overflows_since_rescale <= state.skipped,
        "overflows_since_rescale", wide(state.overflows_since_rescale), "from 0 to skipped");

  constexpr int32_t kFarthest = 1 << 28;  // sums of a few still fit 32 bits
  const auto magnitude = [&](int32_t bits, const char* what) {
    check(bits >= -kFarthest && bits <= kFarthest, what, bits, "from -2^28 to 2^28");
  };
  magnitude(state.peak, "peak");
  magnitude(state.peak_before, "peak_before");
  magnitude(state.gap, "gap");
  const auto count = [&](int32_t value, int32_t most, const char* what) {
    check(value >= 0 && value <= most, what, value, "0 or more, and no more than the rule reaches");
  };
  count(state.samples, internal::kMaxSamples, "samples");
  count(state.scatter, 2 * internal::kBit, "scatter");
  for (const int32_t age : state.ages) count(age, internal::kMaxWait, "ages");
  const auto exponent = [&](int32_t value, const char* what) {
    check(value >= -10000 && value <= 10000, what, value, "an exponent of two");
  };
  exponent(state.lowest, "lowest");
  exponent(state.back, "back");
  count(state.window, internal::kMaxWait, "window");
  count(state.calm, internal::kMaxWait, "calm");
  count(state.retry_wait, internal::kMaxWait, "retry_wait");
  count(state.retry_left, internal::kMaxWait, "retry_left");
  count(state.trial_left, internal::kMaxWait, "trial_left");
  check(state.failed_scale == 0.0f ||
            (state.failed_scale >= kSmallestScale && state.failed_scale <= kLargestScale),
        "failed_scale", state.failed_scale, "0 (none), or from 2^-126 to 2^126");
}

}  // namespace

void GradScaler::load_state(const ScaleState& state) {
  check_no_waiting("load_state()");
  check_state(policy_, state);
  this->state();
  move_to(state);
}

std::string GradScaler::save() const {
  internal::require(!recorded_, ErrorCode::kWrongOrder, [] {
    return "save() was called between step() and update(), when what the step found is not part of "
           "the state yet; save after update().";
  });
  json root = {{"format", kFormat}, {"version", kVersion}};
  root["policy"] = json::object();
  root["state"] = json::object();
  internal::visit_policy(policy_, kVersion, Writer(&root["policy"]));
  internal::visit_state(state(), kVersion, Writer(&root["state"]));
  return root.dump(2);
}

void GradScaler::load(std::string_view text) {
  check_no_waiting("load()");
  const json root = parse(text);
  const int version = root["version"].get<int>();
  ScalePolicy policy;
  std::set<std::string> read;
  const json& saved_policy = object_at(root, "policy");
  internal::visit_policy(policy, version, Reader(saved_policy, "policy", &read));
  check_no_others(saved_policy, read, "policy");
  ScaleState state;
  read.clear();
  const json& saved_state = object_at(root, "state");
  internal::visit_state(state, version, Reader(saved_state, "state", &read));
  check_no_others(saved_state, read, "state");
  try {
    check(policy);
  } catch (const Error& error) {
    bad(std::string("The saved policy is impossible: ") + error.what());
  }
  check_state(policy, state);
  this->state();
  policy_ = policy;
  move_to(state);
}

}  // namespace headroom
