// The kernels of compact formats on every SIMD target: every 16-bit weight with every remainder at
// a boundary is joined and split as by the scalar reference, in whole groups and in the padded
// rest.
#include "apply/formats.h"
#include "apply/kernels.h"
#include "tests/support.h"

namespace headroom {
namespace {

// One SGD step with gradients of 0: w - lr x l2 x w.
struct WeightStep {
  float lr, l2;
};
constexpr WeightStep kKeep = {0.0f, 0.0f};
constexpr WeightStep kDouble = {-1.0f, 1.0f};

template <typename W, int kBits>
struct Stored {
  using Split = internal::SplitMaster<W, kBits>;
  using Remainder = typename Split::Remainder;
  static constexpr uint32_t kKey = 12345;

  std::vector<W> weights = all_patterns<W>();
  std::vector<Remainder> remainders;
  std::vector<float> grads = std::vector<float>(65536, 0.0f);

  explicit Stored(int below) : remainders(65536, static_cast<Remainder>(below)) {}

  // In spans of irregular sizes, so that each weight is in a whole group or in a rest.
  void step(WeightStep by, size_t span_size) {
    internal::RuleNumbers numbers{};
    numbers.multiplier = 1.0f, numbers.lr = by.lr, numbers.l2 = by.l2;
    std::vector<internal::ApplySpan> spans;
    for (size_t i = 0; i < weights.size(); i += span_size) {
      internal::ApplySpan span{};
      span.state.master = &remainders[i];
      span.weight = &weights[i];
      span.grad = &grads[i];
      span.grad_type = DType::kF32;
      span.count = std::min(span_size, weights.size() - i);
      span.first_index = static_cast<uint32_t>(i);
      span.random_key = kKey;
      span.numbers = &numbers;
      spans.push_back(span);
    }
    const auto kind = std::is_same_v<W, f16> ? internal::WeightKind::kF16Master
                                             : internal::WeightKind::kBF16Master;
    const auto format = kBits == 8 ? StateFormat::kByte : StateFormat::kHalf;
    internal::compact_function({internal::Rule::kSgd, DType::kF32, kind, format})(spans.data(),
                                                                                  spans.size(), {});
  }

  Split expected(size_t i, int below, WeightStep by) const {
    const Split before{W::from_bits(static_cast<uint16_t>(i)), static_cast<Remainder>(below)};
    const float master = before.join();
    const uint32_t word = internal::dither_word(static_cast<uint32_t>(i), kKey);
    const float decay = by.l2 == 0.0f ? 0.0f : by.l2 * master;  // 0 x inf would be NaN
    return Split::split(master - by.lr * (0.0f + decay),
                        internal::dither_of<Split::kDropped>(word));
  }
};

template <typename W, int kBits>
void expect_split_and_join_of_the_reference() {
  constexpr int kLowest = -(1 << (kBits - 1)), kHighest = -kLowest - 1;
  for (const int below : {kLowest, kLowest + 1, -1, 0, 1, kHighest - 1, kHighest}) {
    for (const WeightStep by : {kKeep, kDouble}) {
      for (const size_t span_size : {size_t{65536}, size_t{24}}) {
        Stored<W, kBits> stored(below);
        stored.step(by, span_size);
        for (size_t i = 0; i < stored.weights.size(); ++i) {
          const auto expected = stored.expected(i, below, by);
          ASSERT_EQ(stored.weights[i].bits, expected.weight.bits) << i << " " << below;
          ASSERT_EQ(stored.remainders[i], expected.remainder) << i << " " << below;
        }
      }
    }
  }
}

class CompactKernels : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(CompactKernels);

TEST_P(CompactKernels, JoinAndSplitEveryWeightWithBoundaryRemaindersAsTheReferenceDoes) {
  expect_split_and_join_of_the_reference<f16, 8>();
  expect_split_and_join_of_the_reference<f16, 16>();
  expect_split_and_join_of_the_reference<bf16, 8>();
  expect_split_and_join_of_the_reference<bf16, 16>();
}

// What the scalar tests show of the reference, without it: a step that changes no master changes
// no bit, unless the weight is not finite or the master would be beyond 0.
template <typename W, int kBits>
void expect_bits_stay() {
  constexpr int kLowest = -(1 << (kBits - 1)), kHighest = -kLowest - 1;
  // An f16 with 16 bits below has 3 bits more than a float.
  constexpr bool kLonger = kBits == 16 && std::is_same_v<W, f16>;
  for (const int below : {kLowest, kLowest + 8, -8, 0, 8, kHighest - 7, kHighest}) {
    if (kLonger && below % 8 != 0) continue;
    Stored<W, kBits> stored(below);
    stored.step(kKeep, 65536);
    for (size_t i = 0; i < stored.weights.size(); ++i) {
      const W weight = W::from_bits(static_cast<uint16_t>(i));
      if (!std::isfinite(static_cast<float>(weight))) continue;
      if (static_cast<float>(weight) == 0.0f && below < 0) continue;
      ASSERT_EQ(stored.weights[i].bits, weight.bits) << below;
      using Remainder = typename Stored<W, kBits>::Remainder;
      ASSERT_EQ(stored.remainders[i], static_cast<Remainder>(below)) << i;
    }
  }
}

TEST_P(CompactKernels, AStepOfZeroKeepsEveryWeightAndBoundaryRemainder) {
  expect_bits_stay<f16, 8>();
  expect_bits_stay<f16, 16>();
  expect_bits_stay<bf16, 8>();
  expect_bits_stay<bf16, 16>();
}

}  // namespace
}  // namespace headroom
