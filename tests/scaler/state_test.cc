// The scaler's saved state: exact, complete, and refused when it is not.
#include <nlohmann/json.hpp>

#include "decide/transition.h"
#include "tests/support.h"

namespace headroom {
namespace {

using nlohmann::json;

TEST(ScalerState, EveryNumberComesBackExactly) {
  DynamicScale rule = preset("mxnet").dynamic();
  rule.init_scale = 0x1.fffffep20f;
  rule.backoff_factor = 0.1;
  rule.growth_factor = 1.1 + 0x1p-40;
  rule.on_overflow = OnOverflow::kThrow;
  GradScaler scaler(rule);
  internal::ScaleRecord record = scaler.state().record();
  record.numbers.steps = (int64_t{1} << 53) + 1;
  record.numbers.skipped = 5;
  record.numbers.dynamic.pending = 0x1.000002p-20f;
  scaler.load_state(ScaleState(record));
  GradScaler other;
  other.load(scaler.save());
  EXPECT_EQ(other.save(), scaler.save());
  EXPECT_EQ(other.policy().dynamic().growth_factor, rule.growth_factor);
  EXPECT_EQ(other.policy().on_overflow(), OnOverflow::kThrow);
  EXPECT_EQ(other.state().steps(), record.numbers.steps);
  EXPECT_EQ(other.state(), scaler.state());
  EXPECT_NE(other.state(), GradScaler(rule).state());
}

TEST(ScalerState, MissingExtraAndImpossibleValuesAreRefusedAndNothingChanges) {
  GradScaler scaler;
  scaler.set_scale(512.0f);
  const std::string before = scaler.save();
  const json good = json::parse(before);
  const auto refuse = [&](const std::string& part, const std::string& text) {
    expect_error(ErrorCode::kBadState, part, [&] { scaler.load(text); });
    EXPECT_EQ(scaler.save(), before);
  };
  for (const char* section : {"policy", "state"}) {
    for (const auto& item : good[section].items()) {
      json missing = good;
      missing[section].erase(item.key());
      refuse("'" + item.key() + "'", missing.dump());
      json wrong = good;
      wrong[section][item.key()] = "nonsense";
      refuse("'" + item.key() + "'", wrong.dump());
    }
    json extra = good;
    extra[section]["more"] = 1;
    refuse("'more'", extra.dump());
    json without = good;
    without.erase(section);
    refuse(section, without.dump());
  }
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  for (const char* key : {"format", "version", "policy", "state", "more"}) {
    refuse("saved scaler", "{\"" + std::string(key) + "\":" + deep + "}");
  }
  const auto with = [&](const char* section, const char* key, const json& value) {
    json changed = good;
    changed[section][key] = value;
    return changed.dump();
  };
  for (const json& bad : {json(0.0), json(-1.0), json(1e39), json(1e-50), json(nullptr)}) {
    refuse("scale", with("state", "scale", bad));
    refuse("pending", with("state", "pending", bad));
    refuse("init_scale", with("policy", "init_scale", bad));
  }
  refuse("growth_factor", with("policy", "growth_factor", 0.5));
  refuse("growth_interval", with("policy", "growth_interval", 3000000000));
  refuse("growth_interval", with("policy", "growth_interval", 2.5));
  refuse("growth_tracker", with("state", "growth_tracker", 2000));
  refuse("growth_tracker", with("state", "growth_tracker", -1));
  refuse("delay_left", with("state", "delay_left", 0));
  refuse("delay_left", with("state", "delay_left", 2));
  refuse("steps", with("state", "steps", -1));
  refuse("steps", with("state", "steps", 18446744073709551615u));
  refuse("skipped", with("state", "skipped", 1));
  refuse("skips_in_row", with("state", "skips_in_row", 1));
  refuse("pending", with("state", "pending", 1024.0));
  refuse("rule", with("policy", "rule", "magic"));
  refuse("not a JSON object", "");
  refuse("not a JSON object", "[]");
  refuse("not a JSON object", before.substr(0, before.size() / 2));
  json other = good;
  other["format"] = "torch";
  refuse("format", other.dump());
  other = good;
  for (const int version : {1, 3, 5}) {
    other["version"] = version;
    refuse("version", other.dump());
  }
  other = good;
  other["comment"] = "";
  refuse("'comment'", other.dump());
}

TEST(ScalerState, EveryPolicyComesBack) {
  for (const PresetInfo& info : presets()) {
    GradScaler scaler(preset(info.name)), other(NoScale{});
    other.load(scaler.save());
    EXPECT_EQ(other.state(), scaler.state()) << info.name;
  }
}

TEST(ScalerState, AnImpossibleMemoryOfTheHeadroomRuleIsRefused) {
  GradScaler scaler{HeadroomScale{}};
  const json good = json::parse(scaler.save());
  for (const auto& item : good["state"].items()) {
    json bad = good;
    bad["state"][item.key()] = -2147483648.0;
    expect_error(ErrorCode::kBadState, "", [&] { scaler.load(bad.dump()); });
  }
}

TEST(ScalerState, LoadingOpensANewRound) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  SGD optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  const std::string saved = scaler.save();
  scaler.scale(1.0f);
  scaler.step(optimizer);
  scaler.load(saved);
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(optimizer).applied);
}

}  // namespace
}  // namespace headroom
