// The state of an optimizer: save, load, masters, and arrays that the caller owns.
#include "tests/apply/saved_state.h"
#include "tests/float_mode.h"
#include "tests/support.h"

namespace headroom {
namespace {

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
  SavedState saved(first.optimizer.state());
  const std::vector<float> full_weights = first.w32;
  const std::vector<bf16> half_weights = first.w16;

  Training second(precision);
  refill(second.w32, full_weights);
  second.optimizer.load_state(saved.state());
  if (precision.master_weights) {
    ASSERT_EQ(bytes_of(second.w16), bytes_of(half_weights))
        << "weights are restored from the masters";
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

TEST(OptimizerState, EveryTensorIsNamed) {
  Training run({});
  std::vector<std::string> names;
  for (const NamedTensor& named : run.optimizer.state().tensors) names.push_back(named.name);
  EXPECT_EQ(names, (std::vector<std::string>{"half/master", "half/exp_avg", "half/exp_avg_sq",
                                             "full/exp_avg", "full/exp_avg_sq"}));
}

TEST(OptimizerState, InvalidStateIsRejectedWithoutEffect) {
  Training run({});
  run.step(1);
  SavedState good(run.optimizer.state());
  const auto before = bytes_of(run.w16);
  const auto expect_rejected = [&](const std::string& part, const auto& damage) {
    SavedState bad(run.optimizer.state());
    OptimizerState state = bad.state();
    damage(state);
    expect_error(ErrorCode::kBadState, part, [&] { run.optimizer.load_state(state); });
  };
  expect_rejected("2 parameters and 4 tensors", [](OptimizerState& s) { s.tensors.pop_back(); });
  expect_rejected("3 parameters", [](OptimizerState& s) { s.steps.push_back(1); });
  expect_rejected("step count of -1", [](OptimizerState& s) { s.steps[0] = -1; });
  expect_rejected("'other/master'", [](OptimizerState& s) { s.tensors[0].name = "other/master"; });
  expect_rejected("999 elements", [](OptimizerState& s) { s.tensors[0].tensor.count = 999; });
  expect_rejected("type f16", [](OptimizerState& s) { s.tensors[0].tensor.dtype = DType::kF16; });
  expect_rejected("inf or nan", [](OptimizerState& s) {
    static_cast<float*>(s.tensors[4].tensor.data)[99] = kNan;
  });
  expect_rejected("negative values", [](OptimizerState& s) {
    static_cast<float*>(s.tensors[2].tensor.data)[0] = -1.0f;
  });
  expect_rejected("step count of 9223372036854775807",
                  [](OptimizerState& s) { s.steps[0] = std::numeric_limits<int64_t>::max(); });
  expect_rejected("null data", [](OptimizerState& s) { s.tensors[0].tensor.data = nullptr; });
  EXPECT_EQ(bytes_of(run.w16), before);
  EXPECT_EQ(SavedState(run.optimizer.state()).values, good.values);
  EXPECT_EQ(run.optimizer.steps(0), 1);
}

TEST(OptimizerState, NegativeVarianceIsRejectedWhereTheCallerFlushesSubnormals) {
  Training run({});
  run.step(1);
  SavedState saved(run.optimizer.state());
  const OptimizerState state = saved.state();
  static_cast<float*>(state.tensors[2].tensor.data)[0] = -1e-40f;
  const CarelessMode mode(FE_TONEAREST);
  expect_error(ErrorCode::kBadState, "negative values", [&] { run.optimizer.load_state(state); });
}

TEST(OptimizerState, RefreshMastersCopiesModifiedWeights) {
  Training run({});
  run.w16[3] = bf16(42.0f);
  EXPECT_NE(run.optimizer.master(0)[3], 42.0f);
  run.optimizer.refresh_masters();
  EXPECT_EQ(run.optimizer.master(0)[3], 42.0f);
}

template <typename T>
void expect_follow_weight_keeps_masters(const Precision& precision) {
  constexpr size_t kMany = 300000;  // more than one unit of parallel work
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

TEST(OptimizerState, FollowWeightKeepsMastersOfUnchangedElements) {
  expect_follow_weight_keeps_masters<f16>({});
  expect_follow_weight_keeps_masters<bf16>({});
  expect_follow_weight_keeps_masters<bf16>({.stochastic_rounding = true, .seed = 3});
}

// A trainer with its own checkpoint format passes its arrays to the optimizer.
TEST(CallerOwnedState, IsUsedInPlaceWithTheSameResults) {
  constexpr size_t kElements = 1000;
  std::vector<f16> weight_a = random_values<f16>(kElements, 1), weight_b = weight_a;
  std::vector<f16> grad = random_values<f16>(kElements, 2);
  std::vector<float> master(kElements), first(kElements), second(kElements);
  convert(view(weight_b), view(master));
  AdamW plain({{"w", view(weight_a), view(grad)}});
  AdamW in_place({{"w", view(weight_b), view(grad), view(master), view(first), view(second)}});
  EXPECT_EQ(in_place.master(0), master.data());
  for (int step = 0; step < 3; ++step) {
    plain.apply(0.5f, false);
    in_place.apply(0.5f, false);
  }
  EXPECT_EQ(bytes_of(weight_a), bytes_of(weight_b));
  const OptimizerState state = plain.state();
  EXPECT_EQ(std::memcmp(state.tensors[0].tensor.data, master.data(), kElements * 4), 0);
  EXPECT_EQ(std::memcmp(state.tensors[1].tensor.data, first.data(), kElements * 4), 0);
  EXPECT_EQ(std::memcmp(state.tensors[2].tensor.data, second.data(), kElements * 4), 0);

  // Resuming from the trainer's checkpoint needs the arrays and the number of steps.
  std::vector<f16> weight_c = weight_b;
  std::vector<float> master_c = master, first_c = first, second_c = second;
  AdamW resumed({{"w", view(weight_c), view(grad), view(master_c), view(first_c), view(second_c)}});
  resumed.set_steps(3);
  EXPECT_EQ(resumed.steps(0), 3);
  plain.apply(0.5f, false);
  resumed.apply(0.5f, false);
  EXPECT_EQ(bytes_of(weight_a), bytes_of(weight_c));
  expect_error(ErrorCode::kInvalidArgument, "-1", [&] { resumed.set_steps(-1); });
}

TEST(CallerOwnedState, MismatchedArraysAreRejected) {
  std::vector<f16> weight(8), grad(8);
  std::vector<float> wide(8), right(8), other(8), shorter(7);
  std::vector<double> doubles(8);
  const auto expect_rejected = [&](ErrorCode code, const std::string& part,
                                   const Parameter& parameter) {
    expect_error(code, part, [&] { AdamW optimizer({parameter}); });
  };
  const Parameter plain{"w", view(weight), view(grad)};
  Parameter bad = plain;
  bad.master = view(shorter);
  expect_rejected(ErrorCode::kMismatch, "has 7 elements", bad);
  bad.master = view(doubles);
  expect_rejected(ErrorCode::kMismatch, "f64", bad);
  bad = plain;
  bad.first_moment = view(right);
  expect_rejected(ErrorCode::kMismatch, "only some of them", bad);
  bad.second_moment = view(right);
  expect_rejected(ErrorCode::kInvalidArgument, "share memory", bad);
  bad = {"w", view(wide), view(grad), view(right)};
  expect_rejected(ErrorCode::kMismatch, "was given a master", bad);
  expect_error(ErrorCode::kMismatch, "moments", [&] {
    SGD optimizer({{"w", view(weight), view(grad), {}, view(right), view(other)}},
                  {.momentum = 0.9});
  });
}

}  // namespace
}  // namespace headroom
