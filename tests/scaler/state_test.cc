// The scaler's saved state: exact, complete, and refused when it is not.
#include <nlohmann/json.hpp>

#include "tests/support.h"

namespace headroom {
namespace {

using nlohmann::json;

TEST(ScalerState, EveryNumberComesBackExactly) {
  ScalePolicy policy = preset("mxnet");
  policy.init_scale = 0x1.fffffep20f;
  policy.backoff_factor = 0.1;
  policy.growth_factor = 1.1 + 0x1p-40;
  policy.on_overflow = OnOverflow::kThrow;
  GradScaler scaler(policy);
  ScaleState state = scaler.state();
  state.steps = (int64_t{1} << 53) + 1;
  state.skipped = 5;
  state.pending = 0x1.000002p-20f;
  scaler.load_state(state);
  GradScaler other;
  other.load(scaler.save());
  EXPECT_EQ(other.save(), scaler.save());
  EXPECT_EQ(other.policy().growth_factor, policy.growth_factor);
  EXPECT_EQ(other.policy().on_overflow, OnOverflow::kThrow);
  EXPECT_EQ(other.state().steps, state.steps);
  EXPECT_EQ(other.state().pending, state.pending);
}

TEST(ScalerState, MissingExtraAndImpossibleValuesAreRefusedAndNothingChanges) {
  GradScaler scaler;
  scaler.update(512.0f);
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
  refuse("grad_limit", with("policy", "grad_limit", -1.0));
  for (const char* key : {"peak", "peak_before", "lowest", "back", "scatter", "gap"}) {
    refuse(key, with("state", key, 1 << 30));
  }
  for (const char* key :
       {"samples", "window", "retry_wait", "retry_left", "trial_left", "calm", "failed_scale"}) {
    refuse(key, with("state", key, -1));
  }
  for (const json& bad : {json(1), json::array({1, 2}), json(std::vector<int>(32, -1)),
                          json(std::vector<double>(32, 0.5)), json(std::vector<int>(33, 1))}) {
    refuse("ages", with("state", "ages", bad));
  }
  refuse("not a JSON object", "");
  refuse("not a JSON object", "[]");
  refuse("not a JSON object", before.substr(0, before.size() / 2));
  json other = good;
  other["format"] = "torch";
  refuse("format", other.dump());
  other = good;
  other["version"] = 4;
  refuse("version", other.dump());
  other["version"] = 1;  // which had fewer keys
  refuse("'grad_limit'", other.dump());
  other = good;
  other["comment"] = "";
  refuse("'comment'", other.dump());
}

TEST(ScalerState, WhatEarlierVersionsWroteIsStillRead) {
  GradScaler scaler(preset("megatron"));
  scaler.update(512.0f);
  json old = json::parse(scaler.save());
  const auto expect_read = [&] {
    GradScaler loaded(HeadroomScale{});
    loaded.load(old.dump());
    EXPECT_EQ(loaded.save(), scaler.save());
  };
  old["version"] = 2;
  old["policy"].erase("rerun");
  expect_read();
  old["version"] = 1;
  for (const char* key : {"grad_limit", "peak_window", "retry_interval"}) old["policy"].erase(key);
  for (const char* key :
       {"samples", "peak", "peak_before", "window", "scatter", "lowest", "ages", "back", "gap",
        "retry_wait", "retry_left", "trial_left", "calm", "failed_scale"}) {
    old["state"].erase(key);
  }
  expect_read();
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
