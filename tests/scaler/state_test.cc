// The saved state of a scaler round-trips exactly; invalid states are rejected without effect.
#include <nlohmann/json.hpp>

#include "decide/transition.h"
#include "tests/support.h"

namespace headroom {
namespace {

using nlohmann::json;

TEST(ScalerState, RoundTripsEveryNumberExactly) {
  DynamicScale rule = preset("mxnet").dynamic();
  rule.init_scale = 0x1.fffffep20f;
  rule.backoff_factor = 0.1;
  rule.growth_factor = 1.1 + 0x1p-40;
  rule.on_overflow = OnOverflow::kThrow;
  GradScaler scaler(rule);
  internal::ScaleRecord record = internal::ScaleStateAccess::record(scaler.state());
  record.numbers.steps = (int64_t{1} << 53) + 1;
  record.numbers.skipped = 5;
  record.numbers.dynamic.pending = 0x1.000002p-20f;
  scaler.load_state(internal::ScaleStateAccess::make(record));
  GradScaler other;
  other.load(scaler.save());
  EXPECT_EQ(other.save(), scaler.save());
  EXPECT_EQ(other.policy().dynamic().growth_factor, rule.growth_factor);
  EXPECT_EQ(other.policy().on_overflow(), OnOverflow::kThrow);
  EXPECT_EQ(other.state().steps(), record.numbers.steps);
  EXPECT_EQ(other.state(), scaler.state());
  EXPECT_NE(other.state(), GradScaler(rule).state());
}

// A scaler and its saved state, of which tests load modified copies.
class InvalidScalerState : public testing::Test {
 protected:
  // Loading `text` throws an error that contains `part` and leaves the scaler unchanged.
  void expect_rejected(const std::string& part, const std::string& text) {
    expect_error(ErrorCode::kBadState, part, [&] { scaler.load(text); });
    EXPECT_EQ(scaler.save(), saved);
  }
  std::string with(const char* section, const char* key, const json& value) const {
    json changed = good;
    changed[section][key] = value;
    return changed.dump();
  }

  GradScaler scaler;
  const std::string saved = [this] {
    scaler.set_scale(512.0f);
    return scaler.save();
  }();
  const json good = json::parse(saved);
};

TEST_F(InvalidScalerState, MissingExtraAndMistypedFieldsAreRejectedWithoutEffect) {
  for (const char* section : {"policy", "state"}) {
    for (const auto& item : good[section].items()) {
      json missing = good;
      missing[section].erase(item.key());
      expect_rejected("'" + item.key() + "'", missing.dump());
      expect_rejected("'" + item.key() + "'", with(section, item.key().c_str(), "nonsense"));
    }
    expect_rejected("'more'", with(section, "more", 1));
    json without = good;
    without.erase(section);
    expect_rejected(section, without.dump());
  }
  json extra = good;
  extra["comment"] = "";
  expect_rejected("'comment'", extra.dump());
}

TEST_F(InvalidScalerState, InvalidValuesAreRejectedWithoutEffect) {
  for (const json& bad : {json(0.0), json(-1.0), json(1e39), json(1e-50), json(nullptr)}) {
    expect_rejected("scale", with("state", "scale", bad));
    expect_rejected("pending", with("state", "pending", bad));
    expect_rejected("init_scale", with("policy", "init_scale", bad));
  }
  expect_rejected("growth_factor", with("policy", "growth_factor", 0.5));
  expect_rejected("growth_interval", with("policy", "growth_interval", 3000000000));
  expect_rejected("growth_interval", with("policy", "growth_interval", 2.5));
  expect_rejected("growth_tracker", with("state", "growth_tracker", 2000));
  expect_rejected("growth_tracker", with("state", "growth_tracker", -1));
  expect_rejected("delay_left", with("state", "delay_left", 0));
  expect_rejected("delay_left", with("state", "delay_left", 2));
  expect_rejected("steps", with("state", "steps", -1));
  expect_rejected("steps", with("state", "steps", 18446744073709551615u));
  expect_rejected("skipped", with("state", "skipped", 1));
  expect_rejected("skips_in_row", with("state", "skips_in_row", 1));
  expect_rejected("pending", with("state", "pending", 1024.0));
  expect_rejected("rule", with("policy", "rule", "magic"));
}

TEST_F(InvalidScalerState, MalformedTextAndOtherFormatsAreRejectedWithoutEffect) {
  expect_rejected("not a JSON object", "");
  expect_rejected("not a JSON object", "[]");
  expect_rejected("not a JSON object", saved.substr(0, saved.size() / 2));
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  for (const char* key : {"format", "version", "policy", "state", "more"}) {
    expect_rejected("saved scaler", "{\"" + std::string(key) + "\":" + deep + "}");
  }
  json other = good;
  other["format"] = "torch";
  expect_rejected("format", other.dump());
  other = good;
  for (const int version : {1, 3, 5}) {
    other["version"] = version;
    expect_rejected("version", other.dump());
  }
}

TEST(ScalerState, RoundTripsEveryPreset) {
  for (const PresetInfo& info : presets()) {
    GradScaler scaler(preset(info.name)), other(NoScale{});
    other.load(scaler.save());
    EXPECT_EQ(other.state(), scaler.state()) << info.name;
  }
}

TEST(ScalerState, InvalidHeadroomMemoryIsRejected) {
  GradScaler scaler{HeadroomScale{}};
  const json good = json::parse(scaler.save());
  for (const auto& item : good["state"].items()) {
    json bad = good;
    bad["state"][item.key()] = -2147483648.0;
    expect_error(ErrorCode::kBadState, "", [&] { scaler.load(bad.dump()); });
  }
}

TEST(ScalerState, LoadStartsANewRound) {
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
