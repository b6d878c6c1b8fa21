// State dicts in PyTorch's form.
#include <nlohmann/json.hpp>

#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

// What json.dumps(torch.amp.GradScaler(...).state_dict()) writes in Python.
constexpr const char* kFromPython =
    R"({"scale": 131072.0, "growth_factor": 2.0, "backoff_factor": 0.5, )"
    R"("growth_interval": 5, "_growth_tracker": 3})";

TEST(StateDict, HasPyTorchsFiveKeys) {
  const StateDict state = GradScaler().state_dict();
  EXPECT_EQ(state, (StateDict{{"scale", 65536.0},
                              {"growth_factor", 2.0},
                              {"backoff_factor", 0.5},
                              {"growth_interval", 2000.0},
                              {"_growth_tracker", 0.0}}));
}

TEST(StateDict, BelongsAfterUpdate) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(w.sum() * kInfinity).backward();
  scaler.step(optimizer);
  expect_error(ErrorCode::kWrongOrder, "after update()", [&] { scaler.state_dict(); });
  scaler.update();
  EXPECT_EQ(scaler.state_dict().at("scale"), 32768.0);
}

TEST(StateDict, OneThatIsRefusedChangesNothing) {
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

TEST(StateDict, IsJsonThatPythonCanLoad) {
  GradScaler scaler;
  scaler.load_state_dict(state_dict_from_json(kFromPython));
  const std::string text = to_json(scaler.state_dict());
  EXPECT_EQ(nlohmann::json::parse(text), nlohmann::json::parse(kFromPython));
  EXPECT_NE(text.find("\"growth_interval\":5,"), std::string::npos) << "an int, not 5.0: " << text;
  EXPECT_NE(text.find("\"_growth_tracker\":3}"), std::string::npos) << text;
}

TEST(StateDict, ContinuesWhereTheOtherStopped) {
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

TEST(StateDict, BadOnesAreRefusedAndChangeNothing) {
  GradScaler scaler;
  const StateDict before = scaler.state_dict();
  const auto refused = [&](const char* part, const std::function<void(StateDict&)>& change) {
    StateDict state = state_dict_from_json(kFromPython);
    change(state);
    expect_error(ErrorCode::kBadState, part, [&] { scaler.load_state_dict(state); });
    EXPECT_EQ(scaler.state_dict(), before);
  };
  refused("empty", [](StateDict& state) { state.clear(); });
  for (const char* key :
       {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}) {
    refused(key, [&](StateDict& state) { state.erase(key); });
  }
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()}) {
    refused("scale", [&](StateDict& state) { state["scale"] = bad; });
    refused("growth_factor", [&](StateDict& state) { state["growth_factor"] = bad; });
    refused("growth_interval", [&](StateDict& state) { state["growth_interval"] = bad; });
  }
  refused("backoff_factor", [](StateDict& state) { state["backoff_factor"] = 1.0; });
  refused("_growth_tracker", [](StateDict& state) { state["_growth_tracker"] = -1.0; });
  refused("_growth_tracker", [](StateDict& state) { state["_growth_tracker"] = 0.5; });
}

TEST(StateDict, TextThatIsNoStateDictIsRefused) {
  for (const char* text : {"", "[1]", "7", "{\"scale\": \"big\"}", "{\"scale\": null}", "{"}) {
    expect_error(ErrorCode::kBadState, "state dict", [&] { state_dict_from_json(text); });
  }
}

TEST(StateDict, MayBeLoadedAfterAFirstScale) {
  GradScaler scaler;
  torch::Tensor w = leaf({1.0f});
  auto optimizer = sgd({w});
  scaler.scale(torch::ones({}));  // as people do in Python, to have the scale made
  scaler.load_state_dict(state_dict_from_json(kFromPython));
  scaler.scale(w.sum()).backward();
  EXPECT_EQ(scaler.step(optimizer).grad_norm, 1.0);
}

TEST(FullState, KeepsWhatPyTorchDoesNotKnow) {
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
