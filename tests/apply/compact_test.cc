// Optimizers with StateFormat::kHalf and kByte: every step equals a model in double arithmetic, on
// every SIMD target, for any number of threads, tensor size and address; states travel between
// formats; Lion in all of them.
#include <headroom/policy.h>
#include <headroom/scaler.h>

#include "tests/apply/compact_model.h"
#include "tests/apply/saved_state.h"
#include "tests/support.h"

namespace headroom {
namespace {

constexpr uint64_t kSeed = 99;
const std::vector<size_t> kSizes = {1, 3, 8, 31, 32, 33, 100, 257, 2000};
const std::vector<size_t> kJobs = {100, 40000, 7};  // more elements than one job of a thread has

template <typename Options>
internal::RuleSettings settings_of(const Options& o) {
  using internal::Rule;
  if constexpr (std::is_same_v<Options, SGDOptions>) {
    return {.rule = o.momentum == 0.0 ? Rule::kSgd : Rule::kSgdMomentum,
            .nesterov = o.nesterov,
            .lr = o.lr,
            .weight_decay = o.weight_decay,
            .momentum = o.momentum,
            .dampening = o.dampening};
  } else if constexpr (std::is_same_v<Options, LionOptions>) {
    return {.rule = Rule::kLion,
            .decoupled = true,
            .lr = o.lr,
            .weight_decay = o.weight_decay,
            .beta1 = o.beta1,
            .beta2 = o.beta2};
  } else {
    return {.rule = Rule::kAdam,
            .decoupled = std::is_same_v<Options, AdamWOptions>,
            .lr = o.lr,
            .weight_decay = o.weight_decay,
            .beta1 = o.beta1,
            .beta2 = o.beta2,
            .eps = o.eps};
  }
}

// Gradients of very different sizes, with zeros.
template <typename G>
std::vector<G> gradients(size_t count, uint32_t seed) {
  std::vector<G> values = random_values<G>(count, seed);
  for (size_t i = 0; i < count; ++i) {
    if (i % 7 == 3) values[i] = from_float<G>(0.0);
    if (i % 11 == 5) values[i] = from_float<G>(to_double(values[i]) * 1e-3);
    if (i / 64 % 3 == 1) values[i] = from_float<G>(to_double(values[i]) * 0x1p-9);
  }
  return values;
}

float value_of(float x) { return x; }
template <typename T>
float value_of(T x) {
  return static_cast<float>(x);
}

std::vector<float> floats_of(const TensorView& tensor) {
  const auto* data = static_cast<const float*>(tensor.data);
  return {data, data + tensor.count};
}

template <typename W, typename G, typename Optimizer, typename Options>
void expect_steps_of_the_model(const Options& options, StateFormat format,
                               const std::vector<size_t>& sizes = kSizes) {
  std::vector<std::vector<W>> weights;
  std::vector<std::vector<G>> grads;
  std::vector<CompactModel<W>> models;
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    weights.push_back(random_values<W>(sizes[i], static_cast<uint32_t>(i)));
    grads.push_back(std::vector<G>(sizes[i]));
    CompactModel<W> model;
    for (const W w : weights[i]) model.masters.push_back(value_of(w));
    model.first.resize(sizes[i]), model.second.resize(sizes[i]);
    model.format = format, model.settings = settings_of(options);
    models.push_back(model);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back({std::to_string(i), view(weights[i]), view(grads[i])});
  }
  Optimizer optimizer(parameters, options, {.seed = kSeed, .state = format});
  for (uint32_t step = 0; step < 4; ++step) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      refill(grads[i], gradients<G>(sizes[i], 100 * step + static_cast<uint32_t>(i)));
      models[i].step(grads[i], 0.37f, i, kSeed);
    }
    optimizer.apply(0.37f, false);
    const OptimizerState state = optimizer.state();
    for (const NamedTensor& named : state.tensors) {
      const CompactModel<W>& model = models[named.parameter];
      const bool master = named.name.ends_with("master"), second = named.name.ends_with("_sq");
      const auto& expected = master ? model.masters : second ? model.second : model.first;
      ASSERT_EQ(bytes_of(floats_of(named.tensor)), bytes_of(expected)) << named.name << " " << step;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (size_t e = 0; e < sizes[i]; ++e) {
        float expected = models[i].masters[e];
        if constexpr (!std::is_same_v<W, float>) expected = model_weight<W>(expected);
        ASSERT_EQ(value_of(weights[i][e]), expected) << i << " " << e;
      }
    }
  }
}

template <typename W, typename G>
void expect_all_rules(StateFormat format) {
  expect_steps_of_the_model<W, G, AdamW>(AdamWOptions{.lr = 0.01, .weight_decay = 0.1}, format);
  expect_steps_of_the_model<W, G, Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.1}, format);
  expect_steps_of_the_model<W, G, Lion>(LionOptions{.lr = 0.01, .weight_decay = 0.1}, format);
  expect_steps_of_the_model<W, G, SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true},
                                       format);
  expect_steps_of_the_model<W, G, SGD>(SGDOptions{.lr = 0.1, .weight_decay = 0.01}, format);
}

class CompactSteps : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(CompactSteps);

TEST_P(CompactSteps, EveryStepIsThatOfTheModel) {
  for (const StateFormat format : {StateFormat::kHalf, StateFormat::kByte}) {
    expect_all_rules<f16, f16>(format);
    expect_all_rules<bf16, bf16>(format);
    expect_all_rules<bf16, float>(format);
    expect_all_rules<float, float>(format);
    expect_all_rules<float, f16>(format);
    const AdamWOptions adamw{.lr = 0.01};
    expect_steps_of_the_model<bf16, bf16, AdamW>(adamw, format, kJobs);
  }
}

struct CompactTraining {
  std::vector<f16> half = random_values<f16>(1000, 1), half_grad = std::vector<f16>(1000);
  std::vector<bf16> brain = random_values<bf16>(77, 2), brain_grad = std::vector<bf16>(77);
  std::vector<float> full = random_values<float>(333, 3), full_grad = std::vector<float>(333);
  AdamW optimizer;

  explicit CompactTraining(StateFormat format)
      : optimizer({{"half", view(half), view(half_grad)},
                   {"brain", view(brain), view(brain_grad)},
                   {"full", view(full), view(full_grad)}},
                  {.lr = 0.01}, {.state = format}) {}

  void step(uint32_t i) {
    refill(half_grad, gradients<f16>(1000, 10 + i));
    refill(brain_grad, gradients<bf16>(77, 20 + i));
    refill(full_grad, gradients<float>(333, 30 + i));
    optimizer.apply(0.5f, false);
  }

  std::vector<unsigned char> weights() const {
    std::vector<unsigned char> all = bytes_of(half);
    for (const auto& more : {bytes_of(brain), bytes_of(full)}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
};

TEST(CompactState, ResumesBitForBit) {
  for (const StateFormat format : {StateFormat::kHalf, StateFormat::kByte}) {
    CompactTraining whole(format), first(format), second(format);
    for (uint32_t i = 0; i < 8; ++i) whole.step(i);
    for (uint32_t i = 0; i < 4; ++i) first.step(i);
    SavedState saved(first.optimizer.state());
    second.full = first.full;
    second.optimizer.load_state(saved.state());
    EXPECT_EQ(second.weights(), first.weights());
    for (uint32_t i = 4; i < 8; ++i) second.step(i);
    EXPECT_EQ(second.weights(), whole.weights());
    EXPECT_EQ(SavedState(second.optimizer.state()).values,
              SavedState(whole.optimizer.state()).values);
  }
}

// A master halfway between two weights belongs to the upper one in compact state, and to the even
// one in "full". What the weight was before does not matter.
TEST(CompactState, TiesAreLoadedAsTheSavedFormatRounds) {
  for (const StateFormat format : {StateFormat::kHalf, StateFormat::kByte}) {
    for (const uint16_t even : std::initializer_list<uint16_t>{0x3F80, 0x0000, 0x3F82}) {
      const auto odd = static_cast<uint16_t>(even + 1);
      std::vector<float> masters = {internal::bits_float(uint32_t{even} << 16 | 0x8000u)},
                         zeros = {0.0f};
      for (const uint16_t present : {even, odd, uint16_t{0x4040}}) {
        std::vector<bf16> weight = {bf16::from_bits(present)}, grad = {bf16(0.0f)};
        AdamW optimizer({{"w", view(weight), view(grad)}}, {}, {.state = format});
        OptimizerState saved = optimizer.state();
        for (NamedTensor& named : saved.tensors) {
          named.tensor = view(named.name.ends_with("master") ? masters : zeros);
        }
        saved.format = format;
        optimizer.load_state(saved);
        EXPECT_EQ(weight[0].bits, odd);
        for (const NamedTensor& named : optimizer.state().tensors) {
          if (!named.name.ends_with("master")) continue;
          EXPECT_EQ(bytes_of(floats_of(named.tensor)), bytes_of(masters));
        }
        weight[0] = bf16::from_bits(even);
        saved.format = StateFormat::kFull;
        optimizer.load_state(saved);
        EXPECT_EQ(weight[0].bits, even);
      }
    }
  }
}

// The largest difference between two states, relative to the larger of value and `floor` of the
// largest one in a group of 32.
double largest_difference(const std::vector<float>& a, const std::vector<float>& b, double floor) {
  double worst = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    double group = 0.0;
    for (size_t j = i / 32 * 32; j < std::min(a.size(), i / 32 * 32 + 32); ++j) {
      group = std::max(group, std::fabs(static_cast<double>(a[j])));
    }
    const double size = std::max(std::fabs(static_cast<double>(a[i])), group * floor);
    if (size > 0.0) worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - b[i]) / size);
  }
  return worst;
}

TEST(CompactState, TravelsFromFullAndBackWithTheDocumentedLoss) {
  struct Loss {
    StateFormat format;
    double master, moment;
  };
  for (const Loss& loss :
       {Loss{StateFormat::kHalf, 0x1p-24, 0x1p-8}, Loss{StateFormat::kByte, 0x1p-16, 0x1p-4}}) {
    CompactTraining full(StateFormat::kFull), compact(loss.format), back(StateFormat::kFull);
    for (uint32_t i = 0; i < 5; ++i) full.step(i);
    SavedState before(full.optimizer.state());
    compact.full = full.full;
    compact.optimizer.load_state(before.state());
    back.full = full.full;
    SavedState between(compact.optimizer.state());
    back.optimizer.load_state(between.state());
    const SavedState after(back.optimizer.state());
    EXPECT_EQ(after.values, between.values) << "FP32 state holds every compact one";
    for (size_t i = 0; i < before.names.size(); ++i) {
      const bool master = before.names[i].ends_with("master");
      EXPECT_LE(largest_difference(before.values[i], after.values[i], 0x1p-14),
                master ? loss.master : loss.moment)
          << before.names[i] << " " << to_string(loss.format);
    }
    EXPECT_EQ(after.steps, before.steps);
  }
}

TEST(CompactState, BadStatesAreRefusedAndNothingChanges) {
  CompactTraining training(StateFormat::kByte);
  training.step(0);
  const auto weights = training.weights();
  const SavedState before(training.optimizer.state());
  const auto expect_refused = [&](const std::function<void(SavedState*)>& damage) {
    SavedState damaged(training.optimizer.state());
    damage(&damaged);
    expect_error(ErrorCode::kBadState, "", [&] { training.optimizer.load_state(damaged.state()); });
    EXPECT_EQ(training.weights(), weights);
    EXPECT_EQ(SavedState(training.optimizer.state()).values, before.values);
  };
  expect_refused([](SavedState* s) { s->values[1][3] = kNan; });
  expect_refused([](SavedState* s) { s->values[2][3] = -1.0f; });
  expect_refused([](SavedState* s) { s->values[0].pop_back(); });
  expect_refused([](SavedState* s) { s->names[0] = "other/master"; });
  expect_refused([](SavedState* s) { s->steps[1] = -1; });
}

TEST(CompactState, WeightsThatOthersWriteAreKept) {
  for (const StateFormat format : {StateFormat::kHalf, StateFormat::kByte}) {
    std::vector<bf16> weights(1000, bf16(1.0f)), grads(1000, bf16(0.0f));
    AdamW optimizer({{"w", view(weights), view(grads)}}, {.weight_decay = 0.0}, {.state = format});
    optimizer.apply(1.0f, false);
    weights[517] = bf16(3.0f);  // no sample is needed to notice it
    optimizer.apply(1.0f, false);
    EXPECT_EQ(static_cast<float>(weights[517]), 3.0f);
    EXPECT_EQ(static_cast<float>(weights[516]), 1.0f);
    EXPECT_EQ(optimizer.master(0), nullptr);
  }
}

TEST(CompactState, SmallUpdatesAreNotLost) {
  // A hundredth of a unit of bf16 in each step.
  std::vector<bf16> weights(10000, bf16(1.0f));
  std::vector<float> grads(10000, 0x1p-7f / 100.0f);
  SGD optimizer({{"w", view(weights), view(grads)}}, {.lr = 1.0}, {.state = StateFormat::kByte});
  for (int i = 0; i < 1000; ++i) optimizer.apply(1.0f, false);
  const SavedState state(optimizer.state());
  double mean = 0.0;
  for (const float master : state.values[0]) mean += master / 10000.0;
  EXPECT_NEAR(mean, 1.0 - 10 * 0x1p-7, 2e-5);
}

TEST(CompactState, MomentsThatDecaySlowlyReachTheirMean) {
  // Gradients of 1 make the second moment 1 - 0.999^t. Rounded to nearest it would never grow.
  std::vector<float> weights(10000), grads(10000, 1.0f);
  AdamW optimizer({{"w", view(weights), view(grads)}}, {.lr = 1e-6}, {.state = StateFormat::kByte});
  for (int i = 0; i < 1000; ++i) optimizer.apply(1.0f, false);
  double mean = 0.0;
  const SavedState state(optimizer.state());
  for (const float second : state.values[1]) mean += second / 10000.0;
  EXPECT_NEAR(mean, 1.0 - std::pow(0.999, 1000), 0.01);
}

TEST(CompactState, ASkippedStepChangesNothing) {
  CompactTraining training(StateFormat::kByte);
  training.step(0);
  GradScaler scaler(StaticScale{2.0f});
  scaler.scale(1.0f);
  training.half_grad[5] = f16(kInf);
  const auto weights = training.weights();
  const SavedState before(training.optimizer.state());
  EXPECT_FALSE(scaler.step(training.optimizer).applied);
  EXPECT_EQ(training.weights(), weights);
  EXPECT_EQ(SavedState(training.optimizer.state()).values, before.values);
  EXPECT_EQ(training.optimizer.steps(0), 1);
}

TEST(CompactState, MemoryIsThatOfTheFormat) {
  constexpr int64_t kCount = 1 << 20;
  std::vector<bf16> weights(kCount), grads(kCount);
  for (const auto& [format, per_parameter] : {std::pair(StateFormat::kFull, 12.0),
                                              {StateFormat::kHalf, 6.0},
                                              {StateFormat::kByte, 3.0625}}) {
    AdamW optimizer({}, {}, {.state = format});
    size_t bytes = 0;
    optimizer.set_allocator([&bytes](size_t size, const Device&) {
      bytes += size;
      return std::shared_ptr<void>(std::aligned_alloc(64, size), std::free);
    });
    optimizer.add_group({{"w", view(weights), view(grads)}}, {});
    optimizer.allocate();
    EXPECT_NEAR(static_cast<double>(bytes) / kCount, per_parameter, 0.01) << to_string(format);
  }
}

TEST(CompactState, WhatCannotBeCombinedIsRefused) {
  std::vector<bf16> weights(10), grads(10);
  std::vector<float> master(10);
  const std::vector<Parameter> list = {{"w", view(weights), view(grads)}};
  expect_error(ErrorCode::kInvalidArgument, "",
               [&] { AdamW(list, {}, {.master_weights = false, .state = StateFormat::kByte}); });
  expect_error(ErrorCode::kInvalidArgument, "", [&] {
    AdamW(list, {}, {.stochastic_rounding = true, .state = StateFormat::kHalf});
  });
  const std::vector<Parameter> given = {
      {.name = "w", .weight = view(weights), .grad = view(grads), .master = view(master)}};
  expect_error(ErrorCode::kUnsupported, "",
               [&] { AdamW(given, {}, {.state = StateFormat::kHalf}); });
  expect_error(ErrorCode::kInvalidArgument, "", [&] { state_format("bytes"); });
  EXPECT_EQ(state_format("byte"), StateFormat::kByte);
}

TEST(Lion, FullStateIsThatOfThePaper) {
  std::vector<float> weights = {1.0f, -2.0f, 3.0f}, grads = {0.5f, -0.25f, 0.0f};
  Lion optimizer({{"w", view(weights), view(grads)}},
                 {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.5});
  optimizer.apply(1.0f, false);
  EXPECT_FLOAT_EQ(weights[0], 1.0f * 0.95f - 0.1f);
  EXPECT_FLOAT_EQ(weights[1], -2.0f * 0.95f + 0.1f);
  EXPECT_FLOAT_EQ(weights[2], 3.0f * 0.95f) << "the sign of 0 is 0";
  const SavedState state(optimizer.state());
  EXPECT_EQ(state.names[0], "w/exp_avg");
  EXPECT_FLOAT_EQ(state.values[0][0], 0.005f);
  grads = {-0.01f, 0.0f, 1.0f};  // 0.9 m + 0.1 g keeps the sign of the momentum for the first
  optimizer.apply(1.0f, false);
  EXPECT_FLOAT_EQ(weights[0], 0.85f * 0.95f - 0.1f);
  expect_error(ErrorCode::kInvalidArgument, "", [&] {
    Lion({{"w", view(weights), view(grads)}}, {.beta1 = 1.0});
  });
}

TEST(Lion, BitsDoNotDependOnTheTarget) {
  const std::string before = simd_target();
  std::vector<unsigned char> expected;
  for (const std::string& target : simd_targets()) {
    set_simd_target(target);
    auto w = random_values<bf16>(10007, 1), g = random_values<bf16>(10007, 2);
    Lion optimizer({{"w", view(w), view(g)}}, {.lr = 0.01, .weight_decay = 0.1});
    for (int i = 0; i < 4; ++i) optimizer.apply(0.37f, false);
    if (expected.empty()) expected = bytes_of(w);
    EXPECT_EQ(bytes_of(w), expected) << target;
  }
  set_simd_target(before);
}

}  // namespace
}  // namespace headroom
