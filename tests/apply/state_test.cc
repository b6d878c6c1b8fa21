// An optimizer's state goes out and comes in exactly.
#include "tests/support.h"

namespace headroom {
namespace {

// A deep copy, as a checkpoint would hold it.
struct Saved {
  explicit Saved(const OptimizerState& state) : steps(state.steps) {
    for (const NamedTensor& named : state.tensors) {
      const auto* data = static_cast<const float*>(named.tensor.data);
      names.push_back(named.name);
      values.emplace_back(data, data + named.tensor.count);
    }
  }
  OptimizerState state() {
    OptimizerState state;
    state.steps = steps;
    for (size_t i = 0; i < names.size(); ++i) state.tensors.push_back({names[i], view(values[i])});
    return state;
  }
  std::vector<int64_t> steps;
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;
};

struct Training {
  std::vector<bf16> w16 = random_values<bf16>(1000, 1);
  std::vector<float> w32 = random_values<float>(100, 2);
  std::vector<bf16> g16 = std::vector<bf16>(1000);
  std::vector<float> g32 = std::vector<float>(100);
  AdamW optimizer;

  explicit Training(const Precision& precision)
      : optimizer({{"half", view(w16), view(g16)}, {"full", view(w32), view(g32)}}, {.lr = 0.01},
                  precision) {}

  void step(uint32_t i) {
    refill(g16, random_values<bf16>(1000, 10 + i));
    refill(g32, random_values<float>(100, 20 + i));
    optimizer.apply(0.5f, false);
  }
};

void expect_resumes_exactly(const Precision& precision) {
  Training whole(precision);
  for (uint32_t i = 0; i < 8; ++i) whole.step(i);

  Training first(precision);
  for (uint32_t i = 0; i < 4; ++i) first.step(i);
  Saved saved(first.optimizer.state());
  const std::vector<float> full_weights = first.w32;
  const std::vector<bf16> half_weights = first.w16;

  Training second(precision);
  refill(second.w32, full_weights);
  second.optimizer.load_state(saved.state());
  if (precision.master_weights) {
    ASSERT_EQ(bytes_of(second.w16), bytes_of(half_weights)) << "weights come from the masters";
  } else {
    refill(second.w16, half_weights);
  }
  for (uint32_t i = 4; i < 8; ++i) second.step(i);
  EXPECT_EQ(bytes_of(second.w16), bytes_of(whole.w16));
  EXPECT_EQ(bytes_of(second.w32), bytes_of(whole.w32));
}

TEST(OptimizerState, ResumingIsBitIdentical) {
  for (const bool masters : {true, false}) {
    for (const bool random : {true, false}) expect_resumes_exactly({masters, random, 5});
  }
}

TEST(OptimizerState, NamesEveryTensor) {
  Training run({});
  std::vector<std::string> names;
  for (const NamedTensor& named : run.optimizer.state().tensors) names.push_back(named.name);
  EXPECT_EQ(names, (std::vector<std::string>{"half/master", "half/exp_avg", "half/exp_avg_sq",
                                             "full/exp_avg", "full/exp_avg_sq"}));
}

TEST(OptimizerState, ADamagedOneIsRefusedAndNothingChanges) {
  Training run({});
  run.step(1);
  Saved good(run.optimizer.state());
  const auto before = bytes_of(run.w16);
  const auto refuse = [&](const std::string& part, const auto& damage) {
    Saved bad(run.optimizer.state());
    OptimizerState state = bad.state();
    damage(state);
    expect_error(ErrorCode::kBadState, part, [&] { run.optimizer.load_state(state); });
  };
  refuse("2 parameters and 4 tensors", [](OptimizerState& s) { s.tensors.pop_back(); });
  refuse("3 parameters", [](OptimizerState& s) { s.steps.push_back(1); });
  refuse("step count of -1", [](OptimizerState& s) { s.steps[0] = -1; });
  refuse("'other/master'", [](OptimizerState& s) { s.tensors[0].name = "other/master"; });
  refuse("999 elements", [](OptimizerState& s) { s.tensors[0].tensor.count = 999; });
  refuse("type f16", [](OptimizerState& s) { s.tensors[0].tensor.dtype = DType::kF16; });
  refuse("inf or nan",
         [](OptimizerState& s) { static_cast<float*>(s.tensors[4].tensor.data)[99] = kNan; });
  refuse("negative values",
         [](OptimizerState& s) { static_cast<float*>(s.tensors[2].tensor.data)[0] = -1.0f; });
  refuse("step count of 9223372036854775807",
         [](OptimizerState& s) { s.steps[0] = std::numeric_limits<int64_t>::max(); });
  refuse("null data", [](OptimizerState& s) { s.tensors[0].tensor.data = nullptr; });
  EXPECT_EQ(bytes_of(run.w16), before);
  EXPECT_EQ(Saved(run.optimizer.state()).values, good.values);
  EXPECT_EQ(run.optimizer.steps(0), 1);
}

TEST(OptimizerState, RefreshTakesWeightsThatWereChangedByHand) {
  Training run({});
  run.w16[3] = bf16(42.0f);
  EXPECT_NE(run.optimizer.master(0)[3], 42.0f);
  run.optimizer.refresh_masters();
  EXPECT_EQ(run.optimizer.master(0)[3], 42.0f);
}

template <typename T>
void expect_masters_follow(const Precision& precision) {
  constexpr size_t kMany = 300000;  // more than one piece
  std::vector<T> weight = random_values<T>(kMany, 1), grad = random_values<T>(kMany, 2);
  SGD optimizer({{"w", view(weight), view(grad)}}, {.lr = 1e-3}, precision);
  optimizer.apply(1.0f, false);
  const std::vector<float> exact(optimizer.master(0), optimizer.master(0) + kMany);
  const std::vector<T> kept = weight;
  refill(weight, random_values<T>(kMany, 3));
  refill(weight, kept);
  weight[kMany - 1] = T(42.0f);
  weight[5] = T(-42.0f);
  optimizer.follow_weight(0);
  for (size_t i = 0; i < kMany; ++i) {
    const float expected = i == 5 ? -42.0f : i == kMany - 1 ? 42.0f : exact[i];
    ASSERT_EQ(optimizer.master(0)[i], expected) << i;
  }
}

TEST(OptimizerState, MastersOfWeightsThatWereSwappedOutAndBackStayExact) {
  expect_masters_follow<f16>({});
  expect_masters_follow<bf16>({});
  expect_masters_follow<bf16>({.stochastic_rounding = true, .seed = 3});
}

}  // namespace
}  // namespace headroom
