// The kernels of the optimizers: the same bits on every SIMD target and thread count, no writes
// out of bounds, and unbiased stochastic rounding.
#include "apply/rules.h"
#include "tests/support.h"

namespace headroom {
namespace {

// Tensors of irregular sizes, in several pairs of weight and gradient types.
struct Model {
  std::vector<size_t> sizes = {1, 3, 4, 15, 16, 17, 31, 64, 100, 1000, 33333};
  std::vector<std::vector<float>> w32;
  std::vector<std::vector<f16>> w16, g16;
  std::vector<std::vector<bf16>> wb16, gb16;
  std::vector<std::vector<float>> g32;
  std::vector<Parameter> parameters;

  Model() {
    uint32_t seed = 1;
    for (const size_t size : sizes) {
      w32.push_back(random_values<float>(size, seed++));
      w16.push_back(random_values<f16>(size, seed++));
      wb16.push_back(random_values<bf16>(size, seed++));
      g16.push_back(random_values<f16>(size, seed++));
      gb16.push_back(random_values<bf16>(size, seed++));
      g32.push_back(random_values<float>(size, seed++));
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      parameters.push_back({"a" + std::to_string(i), view(w32[i]), view(g16[i])});
      parameters.push_back({"b" + std::to_string(i), view(w16[i]), view(gb16[i])});
      parameters.push_back({"c" + std::to_string(i), view(wb16[i]), view(g32[i])});
    }
  }

  std::vector<unsigned char> weights() const {
    std::vector<unsigned char> all;
    const auto add = [&](const auto& list) {
      for (const auto& values : list) {
        const auto bytes = bytes_of(values);
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    };
    add(w32), add(w16), add(wb16);
    return all;
  }
};

template <typename Make>
void expect_same_bits_everywhere(const Make& make) {
  const std::string before = simd_target();
  std::vector<unsigned char> expected;
  for (const std::string& target : simd_targets()) {
    set_simd_target(target);
    for (const int threads : {1, 2, 5}) {
      set_num_threads(threads);
      Model model;
      auto optimizer = make(model.parameters);
      for (int step = 0; step < 4; ++step) optimizer.apply(0.37f, false);
      if (expected.empty()) expected = model.weights();
      ASSERT_EQ(model.weights(), expected) << target << " " << threads;
    }
  }
  set_simd_target(before);
  set_num_threads(0);
}

TEST(ApplyKernels, ResultBitsDoNotDependOnSimdTargetOrThreadCount) {
  for (const bool masters : {true, false}) {
    for (const bool random : {false, true}) {
      const Precision precision = {masters, random, 7};
      expect_same_bits_everywhere([&](const std::vector<Parameter>& parameters) {
        return AdamW(parameters, {.lr = 0.01}, precision);
      });
      expect_same_bits_everywhere([&](const std::vector<Parameter>& parameters) {
        return SGD(parameters, {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1}, precision);
      });
      expect_same_bits_everywhere([&](const std::vector<Parameter>& parameters) {
        return SGD(parameters, {.lr = 0.01, .weight_decay = 0.1}, precision);
      });
    }
  }
}

class ApplyEdges : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(ApplyEdges);

template <typename T>
void expect_writes_only_given_elements() {
  for (size_t count = 0; count < 70; ++count) {
    std::vector<T> weights(count + 2, from_float<T>(5.0)), grads(count + 2, from_float<T>(1.0));
    const auto size = static_cast<int64_t>(count);
    AdamW optimizer({{"w", view(weights.data() + 1, size), view(grads.data() + 1, size)}});
    optimizer.apply(1.0f, true);
    for (const size_t outside : {size_t{0}, count + 1}) {
      ASSERT_EQ(to_double(weights[outside]), 5.0) << count;
      ASSERT_EQ(to_double(grads[outside]), 1.0) << count;
    }
    for (size_t i = 1; i <= count; ++i) {
      ASSERT_NE(to_double(weights[i]), 5.0) << count << " " << i;
      ASSERT_EQ(to_double(grads[i]), 0.0) << count << " " << i;
    }
  }
}

TEST_P(ApplyEdges, WritesOnlyTheGivenElementsAtAnyLength) {
  expect_writes_only_given_elements<float>();
  std::vector<f16> weights(67, f16(1.0f)), grads(67, f16(1.0f));
  SGD optimizer({{"w", view(weights.data() + 1, 65), view(grads.data() + 1, 65)}}, {.lr = 0.5});
  optimizer.apply(1.0f, false);
  EXPECT_EQ(static_cast<float>(weights[0]), 1.0f);
  EXPECT_EQ(static_cast<float>(weights[1]), 0.5f);
  EXPECT_EQ(static_cast<float>(weights[65]), 0.5f);
  EXPECT_EQ(static_cast<float>(weights[66]), 1.0f);
}

TEST_P(ApplyEdges, ResultsDoNotDependOnAlignment) {
  const std::vector<f16> start = random_values<f16>(103, 1), gradient = random_values<f16>(103, 2);
  std::vector<f16> expected = start, grads = gradient;
  AdamW plain({{"w", view(expected), view(grads)}});
  plain.apply(0.5f, false);
  std::vector<char> weight(103 * 2 + 1), grad(103 * 2 + 1);
  std::memcpy(weight.data() + 1, start.data(), 103 * 2);
  std::memcpy(grad.data() + 1, gradient.data(), 103 * 2);
  AdamW shifted({{"w", view(static_cast<void*>(weight.data() + 1), DType::kF16, 103),
                  view(static_cast<void*>(grad.data() + 1), DType::kF16, 103)}});
  shifted.apply(0.5f, false);
  EXPECT_EQ(std::memcmp(weight.data() + 1, expected.data(), 103 * 2), 0);
}

TEST_P(ApplyEdges, StochasticRoundingIsUnbiasedBetweenTheNeighbours) {
  constexpr size_t kCount = 100000;
  const float value = 1.0f + 0x1p-7f * 0.3f;  // three tenths of the way to the next bf16
  std::vector<bf16> weights(kCount, bf16(0.0f));
  std::vector<float> grads(kCount, -value);
  SGD optimizer({{"w", view(weights), view(grads)}}, {.lr = 1.0},
                {.master_weights = true, .stochastic_rounding = true, .seed = 11});
  optimizer.apply(1.0f, false);
  size_t up = 0;
  for (const bf16 weight : weights) {
    const float rounded = static_cast<float>(weight);
    ASSERT_TRUE(rounded == 1.0f || rounded == 1.0f + 0x1p-7f) << rounded;
    up += rounded > 1.0f;
  }
  EXPECT_NEAR(static_cast<double>(up) / kCount, 0.3, 0.01);
}

TEST(StochasticRounding, KeepsInfNanAndExactValues) {
  for (const float value : {kInf, -kInf, 0.0f, 1.5f, -2.0f}) {
    for (uint32_t index = 0; index < 1000; ++index) {
      ASSERT_EQ(static_cast<float>(internal::round_stochastic(value, index, 99)), value);
    }
  }
  EXPECT_TRUE(std::isnan(static_cast<float>(internal::round_stochastic(kNan, 1, 2))));
}

TEST(StochasticRounding, DependsOnSeedAndStep) {
  const auto run = [](uint64_t seed, int steps) {
    std::vector<bf16> weights(1000, bf16(1.0f));
    std::vector<float> grads(1000, 1e-3f);
    SGD optimizer({{"w", view(weights), view(grads)}}, {.lr = 1.0},
                  {.master_weights = false, .stochastic_rounding = true, .seed = seed});
    for (int i = 0; i < steps; ++i) optimizer.apply(1.0f, false);
    return bytes_of(weights);
  };
  EXPECT_EQ(run(1, 1), run(1, 1));
  EXPECT_NE(run(1, 1), run(2, 1));
  EXPECT_NE(run(1, 1), run(1, 2));
}

TEST(StochasticRounding, PreservesSmallUpdatesOnAverageWithoutMasters) {
  std::vector<bf16> weights(10000, bf16(1.0f));
  std::vector<float> grads(10000, 1e-4f);
  SGD optimizer({{"w", view(weights), view(grads)}}, {.lr = 1.0},
                {.master_weights = false, .stochastic_rounding = true});
  for (int i = 0; i < 500; ++i) optimizer.apply(1.0f, false);
  double mean = 0.0;
  for (const bf16 weight : weights) mean += to_double(weight) / 10000.0;
  EXPECT_NEAR(mean, 0.95, 0.002) << "rounding to nearest would leave it at 1";
}

}  // namespace
}  // namespace headroom
