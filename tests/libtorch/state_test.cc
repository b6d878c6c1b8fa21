// State dicts in the format of PyTorch.
#include <nlohmann/json.hpp>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

// The output of json.dumps(torch.amp.GradScaler(...).state_dict()) in Python.
constexpr const char* kFromPython =
    R"({"scale": 131072.0, "growth_factor": 2.0, "backoff_factor": 0.5, )"
    R"("growth_interval": 5, "_growth_tracker": 3})";

TEST(StateDict, HasPyTorchsKeys) {
  const StateDict state = GradScaler().state_dict();
  EXPECT_EQ(state, (StateDict{{"scale", 65536.0},
                              {"growth_factor", 2.0},
                              {"backoff_factor", 0.5},
                              {"growth_interval", 2000.0},
                              {"_growth_tracker", 0.0}}));
}

TEST(StateDict, SaveBetweenStepAndUpdateIsRejected) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum() * kInfinity).backward();
  scaler.step(optimizer);
  expect_error(ErrorCode::kWrongOrder, "after update()", [&] { scaler.state_dict(); });
  scaler.update();
  EXPECT_EQ(scaler.state_dict().at("scale"), 32768.0);
}

TEST(StateDict, LoadWithPendingGradientsIsRejectedWithoutEffect) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  for (int i = 0; i < 20; ++i) {
    scaler.scale(w.sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  const StateDict before = scaler.state_dict();
  StateDict other = before;
  other["growth_interval"] = 10.0;
  other["_growth_tracker"] = 0.0;
  scaler.scale(w.sum()).backward();
  expect_error(ErrorCode::kWrongOrder, "gradients wait", [&] { scaler.load_state_dict(other); });
  EXPECT_EQ(scaler.state_dict(), before);
}

TEST(StateDict, RoundTripsPyTorchsJson) {
  GradScaler scaler;
  scaler.load_state_dict(state_dict_from_json(kFromPython));
  const std::string text = to_json(scaler.state_dict());
  EXPECT_EQ(nlohmann::json::parse(text), nlohmann::json::parse(kFromPython));
  EXPECT_NE(text.find("\"growth_interval\":5,"), std::string::npos) << "an int, not 5.0: " << text;
  EXPECT_NE(text.find("\"_growth_tracker\":3}"), std::string::npos) << text;
}

TEST(StateDict, ResumesFromPyTorchsState) {
  GradScaler scaler;
  scaler.load_state_dict(state_dict_from_json(kFromPython));
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w}, 0.0);
  for (const double expected : {131072.0, 262144.0}) {
    scaler.scale(w.sum()).backward();
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), expected);
  }
}

TEST(StateDict, InvalidValuesAreRejectedWithoutEffect) {
  GradScaler scaler;
  const StateDict before = scaler.state_dict();
  const auto expect_rejected = [&](const char* part,
                                   const std::function<void(StateDict&)>& change) {
    StateDict state = state_dict_from_json(kFromPython);
    change(state);
    expect_error(ErrorCode::kBadState, part, [&] { scaler.load_state_dict(state); });
    EXPECT_EQ(scaler.state_dict(), before);
  };
  expect_rejected("empty", [](StateDict& state) { state.clear(); });
  for (const char* key :
       {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}) {
    expect_rejected(key, [&](StateDict& state) { state.erase(key); });
  }
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()}) {
    expect_rejected("scale", [&](StateDict& state) { state["scale"] = bad; });
    expect_rejected("growth_factor", [&](StateDict& state) { state["growth_factor"] = bad; });
    expect_rejected("growth_interval", [&](StateDict& state) { state["growth_interval"] = bad; });
  }
  expect_rejected("backoff_factor", [](StateDict& state) { state["backoff_factor"] = 1.0; });
  expect_rejected("_growth_tracker", [](StateDict& state) { state["_growth_tracker"] = -1.0; });
  expect_rejected("_growth_tracker", [](StateDict& state) { state["_growth_tracker"] = 0.5; });
}

TEST(StateDict, IsRefusedUnderRulesThatItCannotDescribe) {
  for (const char* policy : {"headroom", "static:1024"}) {
    GradScaler scaler(GradScalerOptions(parse_policy(policy)));
    expect_error(ErrorCode::kUnsupported, "use save() and load()", [&] { scaler.state_dict(); });
    expect_error(ErrorCode::kUnsupported, "use save() and load()",
                 [&] { scaler.load_state_dict(state_dict_from_json(kFromPython)); });
  }
}

TEST(StateDict, InvalidJsonIsRejected) {
  for (const char* text : {"", "[1]", "7", "{\"scale\": \"big\"}", "{\"scale\": null}", "{"}) {
    expect_error(ErrorCode::kBadState, "state dict", [&] { state_dict_from_json(text); });
  }
}

TEST(StateDict, CanBeLoadedAfterTheFirstScale) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(torch::ones({}));  // common in Python code, to initialise the scale
  scaler.load_state_dict(state_dict_from_json(kFromPython));
  scaler.scale(w.sum()).backward();
  EXPECT_EQ(scaler.step(optimizer).grad_norm, 1.0);
}

TEST(FullState, RoundTripsPolicyAndCounters) {
  GradScaler scaler(preset("deepspeed"));
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum() * std::numeric_limits<double>::infinity()).backward();
  scaler.step(optimizer);
  scaler.update();
  GradScaler other;
  other.load(scaler.save());
  EXPECT_EQ(other.save(), scaler.save());
  EXPECT_EQ(other.state(), scaler.state());
}

}  // namespace
}  // namespace headroom::libtorch
