// Weights that the user writes between two steps: the next step notices them, and their masters
// follow.
#include "apply/rules.h"
#include "tests/support.h"

namespace headroom {
namespace {

constexpr size_t kAlwaysKept = 2 * internal::CpuSamples::kGroup;  // consecutive elements
constexpr size_t kSmall = internal::CpuSamples::kWhole;           // elements of a small tensor

// A weight that is trained for some steps, so that its master is not a 16-bit number.
template <typename T, typename Optimizer = AdamW>
struct TrainedWeight {
  std::vector<T> weight, grad;
  Optimizer optimizer;

  template <typename Options>
  explicit TrainedWeight(size_t count, const Options& options, const Precision& precision = {})
      : weight(random_values<T>(count, 1)),
        grad(random_values<T>(count, 2)),
        optimizer({{"w", view(weight), view(grad)}}, options, precision) {
    for (int i = 0; i < 3; ++i) step();
  }
  explicit TrainedWeight(size_t count) : TrainedWeight(count, AdamWOptions{.lr = 1e-4}) {}

  void step() { optimizer.apply(0.5f, false); }

  // Weights and state.
  std::vector<std::vector<unsigned char>> bytes() const {
    std::vector<std::vector<unsigned char>> all = {bytes_of(weight)};
    for (const NamedTensor& named : optimizer.state().tensors) {
      const auto* const data = static_cast<const unsigned char*>(named.tensor.data);
      all.emplace_back(data, data + named.tensor.bytes());
    }
    return all;
  }
};

// A step after `write` has to end as if follow_weight() had been called before it.
template <typename Make, typename Write>
void expect_kept(const Make& make, const Write& write) {
  auto noticed = make(), followed = make();
  const auto before = noticed.weight;
  write(noticed.weight);
  ASSERT_NE(bytes_of(noticed.weight), bytes_of(before));
  write(followed.weight);
  followed.optimizer.follow_weight(0);
  noticed.step();
  followed.step();
  ASSERT_EQ(noticed.bytes(), followed.bytes());
}

template <typename T, typename Optimizer, typename Options>
void expect_changed_tensors_are_kept(const Options& options) {
  for (const bool stochastic : {false, true}) {
    for (const size_t count : {size_t{1}, size_t{5}, size_t{100}, kSmall + 1, size_t{100003}}) {
      SCOPED_TRACE(count);
      expect_kept(
          [&] {
            return TrainedWeight<T, Optimizer>(count, options, {true, stochastic, 3});
          },
          [](std::vector<T>& weight) {
            for (T& w : weight) w = T(static_cast<float>(w) * -0.5f);
          });
    }
  }
}

class ChangedWeights : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(ChangedWeights);

TEST_P(ChangedWeights, WholeTensorsAreKeptByEveryOptimizer) {
  expect_changed_tensors_are_kept<f16, AdamW>(AdamWOptions{.lr = 1e-4});
  expect_changed_tensors_are_kept<bf16, AdamW>(AdamWOptions{.lr = 1e-4});
  expect_changed_tensors_are_kept<bf16, Adam>(AdamOptions{.lr = 1e-4});
  expect_changed_tensors_are_kept<f16, SGD>(SGDOptions{.lr = 1e-4});
  expect_changed_tensors_are_kept<bf16, SGD>(SGDOptions{.lr = 1e-4, .momentum = 0.9});
}

TEST_P(ChangedWeights, EveryElementOfASmallTensorIsKept) {
  for (const size_t element : {size_t{0}, size_t{1}, size_t{4095}, kSmall - 1}) {
    expect_kept([] { return TrainedWeight<f16>(kSmall); },
                [&](std::vector<f16>& weight) { weight[element] = f16(9.0f); });
  }
}

TEST(ChangedWeightsOfLargeTensors, LongRunsAreKeptWithAllOtherChanges) {
  constexpr size_t kCount = 5 * kAlwaysKept + 77;
  std::mt19937 generator(1);
  for (int i = 0; i < 20; ++i) {
    const size_t first = generator() % (kCount - kAlwaysKept);
    const size_t elsewhere = generator() % kCount;
    expect_kept([] { return TrainedWeight<bf16>(kCount); },
                [&](std::vector<bf16>& weight) {
                  std::fill_n(weight.begin() + static_cast<ptrdiff_t>(first), kAlwaysKept,
                              bf16(0.25f));
                  weight[elsewhere] = bf16(3.0f);
                });
  }
}

TEST(ChangedWeightsOfLargeTensors, AreKeptWithTheSameBitsForAnyThreadCount) {
  std::vector<std::vector<unsigned char>> expected;
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    TrainedWeight<f16> training(3000000);
    for (size_t i = 0; i < training.weight.size(); i += 3) training.weight[i] = f16(0.5f);
    training.step();
    if (expected.empty()) expected = training.bytes();
    EXPECT_EQ(training.bytes(), expected) << threads;
  }
  set_num_threads(0);
}

TEST(ChangedWeightsOnce, SwappedOutAndBackKeepTheirExactMasters) {
  TrainedWeight<f16> plain(100003), swapped(100003);
  const std::vector<f16> kept = swapped.weight;
  refill(swapped.weight, random_values<f16>(kept.size(), 5));
  refill(swapped.weight, kept);
  plain.step();
  swapped.step();
  EXPECT_EQ(plain.bytes(), swapped.bytes());
}

TEST(ChangedWeightsOnce, SkippedStepChangesNothingAndTheNextOneKeepsThem) {
  const auto run = [](bool skip) {
    TrainedWeight<f16> training(100003);
    GradScaler scaler(StaticScale{.scale = 2.0f});
    const std::vector<f16> grad = training.grad;
    for (f16& w : training.weight) w = f16(0.75f);
    if (skip) {
      const auto before = training.bytes();
      training.grad[7] = f16(kInf);
      scaler.scale(1.0f);
      EXPECT_FALSE(scaler.step(training.optimizer, {.clear_grads = ClearGrads::kNever}).applied);
      scaler.update();
      EXPECT_EQ(training.bytes(), before);
      refill(training.grad, grad);
    }
    scaler.scale(1.0f);
    EXPECT_TRUE(scaler.step(training.optimizer).applied);
    return training.bytes();
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(ChangedWeightsOnce, WithoutMastersAreTheWeights) {
  std::vector<bf16> weight(100, bf16(1.0f)), grad(100, bf16(1.0f));
  SGD optimizer({{"w", view(weight), view(grad)}}, {.lr = 0.5}, {.master_weights = false});
  optimizer.apply(1.0f, false);
  refill(weight, std::vector<bf16>(100, bf16(4.0f)));
  optimizer.apply(1.0f, false);
  EXPECT_EQ(static_cast<float>(weight[99]), 3.5f);
}

// The vector kernels against came_from(), for masters near the limits of every decision.
template <typename T>
void expect_followed_as_by_came_from(bool stochastic) {
  std::vector<float> masters;
  std::vector<T> weights;
  std::mt19937 generator(4);
  for (int i = 0; i < 20000; ++i) {
    const auto bits = static_cast<uint32_t>(generator());
    constexpr uint32_t kLow[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF};
    const uint32_t low = i % 9 == 8 ? bits & 0xFFFF : kLow[i % 9];
    const auto master = std::bit_cast<float>((bits & 0xFFFF0000u) | low);
    if (std::isnan(master)) continue;  // the bits of NaN are not part of the promise
    const auto nearest = static_cast<uint16_t>(T(master).bits + i % 5 - 2);
    masters.push_back(master);
    weights.push_back(T::from_bits(i % 7 == 6 ? static_cast<uint16_t>(generator()) : nearest));
  }
  std::vector<float> expected = masters;
  for (size_t i = 0; i < masters.size(); ++i) {
    const uint16_t nearest = T(masters[i]).bits;
    if (!internal::came_from(masters[i], weights[i].bits, nearest, stochastic)) {
      expected[i] = static_cast<float>(weights[i]);
    }
  }
  SGD optimizer({{"w", view(weights), {}, view(masters)}}, {}, {true, stochastic, 1});
  optimizer.follow_weight(0);
  EXPECT_EQ(bytes_of(masters), bytes_of(expected));
}

TEST_P(ChangedWeights, AreRecognisedByTheScalarRule) {
  expect_followed_as_by_came_from<f16>(false);
  expect_followed_as_by_came_from<bf16>(false);
  expect_followed_as_by_came_from<bf16>(true);
}

template <typename Samples>
void expect_samples_within_their_groups() {
  for (const int64_t count : {int64_t{1}, Samples::kGroup + 1, 5 * Samples::kGroup - 3}) {
    for (int64_t group = 0; group < Samples::groups(count); ++group) {
      for (uint64_t base = 0; base < 200; ++base) {
        const int64_t place = Samples::place(base, group, count);
        ASSERT_EQ(place / Samples::kGroup, group);
        ASSERT_EQ(place % Samples::kSize, 0);
        ASSERT_LT(place, count);
      }
    }
  }
}

TEST(SamplesOfWeights, AreWithinTheirGroups) {
  expect_samples_within_their_groups<internal::CpuSamples>();
  expect_samples_within_their_groups<internal::CudaSamples>();
}

}  // namespace
}  // namespace headroom
