// The settings of policies: checks, access by name, and the text form.
#include <headroom/policy.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <type_traits>

#include "core/check.h"
#include "decide/settings.h"

namespace headroom {
namespace {

using internal::check_value;
using internal::number;
using internal::require;

bool power_of_two(float value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5f;
}

// min_scale <= init_scale <= max_scale; with `stay_above` the scale never equals min_scale.
void check_bounds(float init, float least, float most, bool stay_above) {
  check_value(most >= least, "max_scale", most, "min_scale or more");
  check_value(init <= most, "init_scale", init,
              "max_scale or less; raise max_scale or start lower");
  check_value(
      stay_above ? init > least : init >= least, "init_scale", init,
      stay_above ? "above min_scale" : "min_scale or more; lower min_scale or start higher");
}

// The rule computes with exponents only.
void check_headroom(const HeadroomScale& rule) {
  check_bounds(rule.init_scale, rule.min_scale, rule.max_scale, false);
  constexpr const char* kPower = "a power of two under this rule";
  check_value(power_of_two(rule.init_scale), "init_scale", rule.init_scale, kPower);
  check_value(power_of_two(rule.min_scale), "min_scale", rule.min_scale, kPower);
  check_value(power_of_two(rule.max_scale), "max_scale", rule.max_scale, kPower);
  check_value(!rule.retry || rule.on_overflow == OnOverflow::kSkip, "retry", rule.retry,
              "0 where an overflow throws");
}

// Calls found(member) for the setting of this name; throws Error(kInvalidArgument) if there is
// none.
template <typename Policy, typename Found>
void with_setting(Policy& policy, const std::string& name, const Found& found) {
  bool known = false;
  std::string names;
  PolicySettings::visit(policy, [&](const Setting& setting, auto& member) {
    names += (names.empty() ? "" : ", ") + std::string(setting.name);
    if (name != setting.name) return;
    known = true;
    found(member);
  });
  require(known, ErrorCode::kInvalidArgument, [&] {
    return "The " + std::string(to_string(policy.rule())) + " policy has no setting '" + name +
           "'; it has " + names + ".";
  });
}

// The value of a setting as parse_policy() reads it.
template <typename Member>
std::string value_text(const Member& member) {
  if constexpr (std::is_same_v<Member, bool>) {
    return member ? "true" : "false";
  } else if constexpr (std::is_same_v<Member, OnOverflow>) {
    return word_of(member);
  } else {
    return number(static_cast<double>(member));
  }
}

}  // namespace

DynamicScale ScalePolicy::dynamic() const {
  require(if_dynamic() != nullptr, ErrorCode::kInvalidArgument, [&] {
    return std::string("This policy is ") + to_string(rule()) +
           " and has no settings of DynamicScale.";
  });
  return dynamic_;
}

double ScalePolicy::get(const std::string& setting) const {
  double value = 0.0;
  with_setting(*this, setting, [&](const auto& member) { value = static_cast<double>(member); });
  return value;
}

void ScalePolicy::set(const std::string& setting, double value) {
  with_setting(*this, setting, [&](auto& member) {
    using Member = std::remove_reference_t<decltype(member)>;
    bool holds = true;  // whether the conversion below keeps the value
    if constexpr (std::is_same_v<Member, bool> || std::is_enum_v<Member>) {
      holds = value == 0.0 || value == 1.0;
    } else if constexpr (std::is_integral_v<Member>) {
      holds = std::fabs(value) <= (sizeof(Member) == 4 ? 0x1p31 - 1.0 : 0x1p53) &&
              value == std::floor(value);
    } else if constexpr (std::is_same_v<Member, float>) {
      holds = !(std::fabs(value) > std::numeric_limits<float>::max()) || std::isinf(value);
    }
    check_value(holds, setting, value, "a value that this setting can hold");
    member = static_cast<Member>(value);
  });
}

float ScalePolicy::init_scale() const {
  return if_static() ? static_.scale : if_dynamic() ? dynamic_.init_scale : headroom_.init_scale;
}
// A static scale has no bounds of its own: set_scale() accepts any valid scale.
float ScalePolicy::min_scale() const {
  return if_static() ? kSmallestScale : if_dynamic() ? dynamic_.min_scale : headroom_.min_scale;
}
float ScalePolicy::max_scale() const {
  return if_static() ? kLargestScale : if_dynamic() ? dynamic_.max_scale : headroom_.max_scale;
}
// False for NaN, which fails every comparison.
bool ScalePolicy::allows(float scale) const {
  const bool above =
      if_dynamic() && dynamic_.stay_above_min ? scale > min_scale() : scale >= min_scale();
  return above && scale <= max_scale() && (!if_headroom() || power_of_two(scale));
}
OnOverflow ScalePolicy::on_overflow() const {
  return if_static()    ? static_.on_overflow
         : if_dynamic() ? dynamic_.on_overflow
                        : headroom_.on_overflow;
}

const char* to_string(ScalePolicy::Rule rule) {
  constexpr const char* kNames[] = {"static", "dynamic", "headroom"};
  return kNames[static_cast<int>(rule)];
}

std::vector<SettingInfo> policy_settings() {
  std::vector<SettingInfo> list;
  for (const ScalePolicy& policy :
       {ScalePolicy(StaticScale{}), ScalePolicy(DynamicScale{}), ScalePolicy(HeadroomScale{})}) {
    PolicySettings::visit(policy, [&](const Setting& setting, const auto& member) {
      list.push_back(
          {policy.rule(), setting.name, value_text(member), setting.allowed, setting.summary});
    });
  }
  return list;
}

// "preset" or "preset:name=value,name=value", or "static:value".
ScalePolicy parse_policy(const std::string& text) {
  const size_t colon = text.find(':');
  ScalePolicy policy = preset(text.substr(0, colon));
  size_t begin = colon == std::string::npos ? text.size() : colon + 1;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const size_t equals = item.find('=');
    const bool short_form = equals == std::string::npos && policy.if_static() != nullptr;  // :512
    const std::string value = short_form                    ? item
                              : equals == std::string::npos ? ""
                                                            : item.substr(equals + 1);
    double parsed = value == "true" || value == "throw" ? 1.0 : 0.0;
    if (value != "true" && value != "false" && value != "skip" && value != "throw") {
      const auto result = std::from_chars(value.data(), value.data() + value.size(), parsed);
      require(result.ec == std::errc() && result.ptr == value.data() + value.size(),
              ErrorCode::kInvalidArgument, [&] {
                const char* const rest =
                    equals == std::string::npos
                        ? "' is not a setting; write it as growth_interval=500, with commas "
                          "between several."
                        : "' has a value that is neither a number nor true, false, skip or throw.";
                return std::string("'").append(item).append("' in the policy '").append(text) +
                       rest;
              });
    }
    policy.set(short_form ? "scale" : item.substr(0, equals), parsed);
    begin = end + 1;
  }
  validate(policy);
  return policy;
}

std::string to_string(const ScalePolicy& policy) {
  std::string text = to_string(policy.rule());
  char separator = ':';
  PolicySettings::visit(policy, [&](const Setting& setting, const auto& member) {
    text += separator;
    text += setting.name;
    text += "=" + value_text(member);
    separator = ',';
  });
  return text;
}

// First each setting by itself, then those that depend on each other.
void validate(const ScalePolicy& policy) {
  PolicySettings::visit(policy, [](const Setting& setting, const auto& member) {
    const auto value = static_cast<double>(member);
    check_value(value >= setting.least && value <= setting.most, setting.name, value,
                setting.allowed);
  });
  if (const DynamicScale* const rule = policy.if_dynamic()) {
    check_bounds(rule->init_scale, rule->min_scale, rule->max_scale, rule->stay_above_min);
  }
  if (const HeadroomScale* const rule = policy.if_headroom()) check_headroom(*rule);
}

}  // namespace headroom
