// The optimizers against recorded results of torch.optim and against the formulas in double
// precision; groups, gradients and rebinding.
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "tests/support.h"

namespace headroom {
namespace {

constexpr size_t kCount = 19;
constexpr int kSteps = 20;

float golden_weight(size_t i) {
  return static_cast<float>((static_cast<double>(i * 37 % 101) - 50.0) / 50.0);
}
float golden_grad(size_t i, int step) {
  return static_cast<float>(
      (static_cast<double>((i * 53 + static_cast<size_t>(step) * 29) % 97) - 48.0) / 480.0);
}

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<Parameter>)>;

const std::map<std::string, MakeOptimizer>& golden_cases() {
  const auto sgd = [](const SGDOptions& options) -> MakeOptimizer {
    return [options](auto parameters) { return std::make_unique<SGD>(parameters, options); };
  };
  const auto adam = [](const AdamOptions& options) -> MakeOptimizer {
    return [options](auto parameters) { return std::make_unique<Adam>(parameters, options); };
  };
  const auto adamw = [](const AdamWOptions& options) -> MakeOptimizer {
    return [options](auto parameters) { return std::make_unique<AdamW>(parameters, options); };
  };
  static const std::map<std::string, MakeOptimizer> cases = {
      {"sgd", sgd({.lr = 0.1})},
      {"sgd_decay", sgd({.lr = 0.1, .weight_decay = 0.01})},
      {"sgd_momentum", sgd({.lr = 0.1, .momentum = 0.9})},
      {"sgd_dampening", sgd({.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01})},
      {"sgd_nesterov", sgd({.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true})},
      {"adam", adam({.lr = 0.01})},
      {"adam_decay",
       adam({.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1})},
      {"adamw", adamw({.lr = 0.01})},
      {"adamw_decay",
       adamw({.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1})},
  };
  return cases;
}

class OptimizerReference : public EveryTarget {};
HEADROOM_ON_EVERY_TARGET(OptimizerReference);

TEST_P(OptimizerReference, MatchesTorchOptimToRounding) {
  std::ifstream file(HEADROOM_TEST_DATA "/apply/torch_optim.golden");
  ASSERT_TRUE(file);
  size_t compared = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    std::string name;
    fields >> name;
    ASSERT_TRUE(golden_cases().contains(name)) << name;
    std::vector<float> weights(kCount), grads(kCount);
    for (size_t i = 0; i < kCount; ++i) weights[i] = golden_weight(i);
    const auto optimizer = golden_cases().at(name)({{"w", view(weights), view(grads)}});
    for (int step = 0; step < kSteps; ++step) {
      for (size_t i = 0; i < kCount; ++i) grads[i] = golden_grad(i, step) * 1024.0f;
      optimizer->apply(0x1p-10f, false);
    }
    for (size_t i = 0; i < kCount; ++i) {
      float expected = 0.0f;
      fields >> expected;
      EXPECT_NEAR(weights[i], expected, 4e-7 * (1.0 + std::fabs(expected))) << name << " " << i;
    }
    ++compared;
  }
  EXPECT_EQ(compared, golden_cases().size());
}

// AdamW in double precision, on the unscaled gradients.
struct AdamWReference {
  std::vector<double> w, m, v;
  int t = 0;

  explicit AdamWReference(std::vector<double> weights)
      : w(std::move(weights)), m(w.size()), v(w.size()) {}

  void step(const std::vector<double>& g, const AdamWOptions& o) {
    ++t;
    for (size_t i = 0; i < w.size(); ++i) {
      w[i] *= 1.0 - o.lr * o.weight_decay;
      m[i] = o.beta1 * m[i] + (1.0 - o.beta1) * g[i];
      v[i] = o.beta2 * v[i] + (1.0 - o.beta2) * g[i] * g[i];
      const double mhat = m[i] / (1.0 - std::pow(o.beta1, t));
      const double vhat = v[i] / (1.0 - std::pow(o.beta2, t));
      w[i] -= o.lr * mhat / (std::sqrt(vhat) + o.eps);
    }
  }
};

template <typename W, typename G>
void expect_master_matches_reference() {
  constexpr float kScale = 1024.0f;
  const AdamWOptions options = {.lr = 0.01, .weight_decay = 0.1};
  std::vector<W> weights = random_values<W>(101, 1);
  std::vector<G> grads(101);
  std::vector<double> start;
  for (const W weight : weights) start.push_back(to_double(weight));
  AdamW optimizer({{"w", view(weights), view(grads)}}, options);
  AdamWReference reference(start);
  for (uint32_t step = 0; step < 30; ++step) {
    refill(grads, random_values<G>(101, 100 + step, kScale));
    std::vector<double> unscaled;
    for (const G grad : grads) unscaled.push_back(to_double(grad) / kScale);
    optimizer.apply(1.0f / kScale, false);
    reference.step(unscaled, options);
  }
  EXPECT_EQ(optimizer.steps(0), 30);
  for (size_t i = 0; i < weights.size(); ++i) {
    const float master = optimizer.master(0)[i];
    ASSERT_NEAR(master, reference.w[i], 2e-6 * (1.0 + std::fabs(reference.w[i]))) << i;
    ASSERT_EQ(to_double(weights[i]), to_double(from_float<W>(master)))
        << "the weight is the master, rounded once";
  }
}

TEST_P(OptimizerReference, MastersMatchDoublePrecisionForEveryDtypePair) {
  expect_master_matches_reference<float, float>();
  expect_master_matches_reference<float, f16>();
  expect_master_matches_reference<float, bf16>();
  expect_master_matches_reference<f16, f16>();
  expect_master_matches_reference<f16, bf16>();
  expect_master_matches_reference<f16, float>();
  expect_master_matches_reference<bf16, f16>();
  expect_master_matches_reference<bf16, bf16>();
  expect_master_matches_reference<bf16, float>();
}

TEST(MasterWeights, KeepUpdatesThat16BitWeightsWouldLose) {
  std::vector<f16> with(8, f16(1.0f)), without(8, f16(1.0f)), grads(8, f16(1.0f));
  SGD with_masters({{"w", view(with), view(grads)}}, {.lr = 1e-4});
  std::vector<f16> grads2 = grads;
  SGD without_masters({{"w", view(without), view(grads2)}}, {.lr = 1e-4},
                      {.master_weights = false});
  for (int i = 0; i < 1000; ++i) {
    with_masters.apply(1.0f, false);
    without_masters.apply(1.0f, false);
  }
  EXPECT_NEAR(static_cast<float>(with[0]), 0.9f, 1e-3);
  EXPECT_EQ(static_cast<float>(without[0]), 1.0f);
  EXPECT_EQ(without_masters.master(0), nullptr);
}

TEST(ParameterGroups, UseTheirOwnOptions) {
  std::vector<float> a = {1.0f}, b = {1.0f}, ga = {1.0f}, gb = {1.0f};
  SGD optimizer({{"a", view(a), view(ga)}}, {.lr = 0.1});
  const size_t group = optimizer.add_group({{"b", view(b), view(gb)}}, {.lr = 0.5});
  EXPECT_EQ(group, 1u);
  optimizer.apply(1.0f, false);
  EXPECT_FLOAT_EQ(a[0], 0.9f);
  EXPECT_FLOAT_EQ(b[0], 0.5f);
  optimizer.set_lr(0.25);
  optimizer.apply(1.0f, false);
  EXPECT_FLOAT_EQ(a[0], 0.65f);
  EXPECT_FLOAT_EQ(b[0], 0.25f);
  EXPECT_EQ(optimizer.options(1).lr, 0.25);
}

TEST(ParameterGroups, AddedParametersStartAtStepZero) {
  std::vector<float> a = {1.0f}, b = {1.0f}, ga = {0.5f}, gb = {0.5f};
  AdamW optimizer({{"a", view(a), view(ga)}}, {.lr = 0.1, .weight_decay = 0.0});
  for (int i = 0; i < 3; ++i) optimizer.apply(1.0f, false);
  optimizer.add_group({{"b", view(b), view(gb)}}, {.lr = 0.1, .weight_decay = 0.0});
  optimizer.apply(1.0f, false);
  EXPECT_EQ(optimizer.steps(0), 4);
  EXPECT_EQ(optimizer.steps(1), 1);
  EXPECT_NEAR(b[0], 0.9f, 1e-6) << "the first Adam step has size lr for any gradient";
}

TEST(Gradients, ParametersWithoutAGradientAreNotUpdated) {
  std::vector<float> a = {1.0f}, b = {1.0f}, ga = {1.0f}, gb = {1.0f};
  AdamW optimizer({{"a", view(a), view(ga)}, {"b", view(b), TensorView{}}}, {.lr = 0.1});
  optimizer.apply(1.0f, false);
  EXPECT_EQ(b[0], 1.0f);
  EXPECT_EQ(optimizer.steps(1), 0);
  optimizer.set_grad(1, view(gb));
  optimizer.set_grad(0, TensorView{});
  const float before = a[0];
  optimizer.apply(1.0f, false);
  EXPECT_EQ(a[0], before);
  EXPECT_NE(b[0], 1.0f);
  EXPECT_EQ(optimizer.steps(0), 1);
  EXPECT_EQ(optimizer.steps(1), 1);
}

TEST(Optimizers, ParameterIndexOutOfRangeIsRejected) {
  SGD optimizer({});
  expect_error(ErrorCode::kInvalidArgument, "no parameter 0", [&] { optimizer.steps(0); });
  expect_error(ErrorCode::kInvalidArgument, "no parameter 0", [&] { optimizer.master(0); });
}

TEST(Optimizers, MovedFromOptimizerRejectsEveryCall) {
  std::vector<float> w = {1.0f}, g = {1.0f};
  const std::vector<Parameter> parameters = {{"w", view(w), view(g)}};
  SGD moved_from(parameters);
  const OptimizerState saved = moved_from.state();
  SGD moved_to = std::move(moved_from);
  const std::function<void()> calls[] = {
      // NOLINTBEGIN(bugprone-use-after-move)
      [&] { moved_from.state(); },           [&] { moved_from.add_group(parameters, {}); },
      [&] { moved_from.rebind({}); },        [&] { moved_from.set_grad(0, view(g)); },
      [&] { moved_from.steps(0); },          [&] { moved_from.master(0); },
      [&] { moved_from.apply(1.0f, true); }, [&] { moved_from.load_state(saved); },
      [&] { moved_from.refresh_masters(); }, [&] { moved_from.follow_weight(0); },
      [&] { moved_from.set_lr(1.0); }};  // NOLINTEND(bugprone-use-after-move)
  for (const auto& call : calls) {
    expect_error(ErrorCode::kInvalidArgument, "was moved from", call);
  }
  moved_to.apply(1.0f, true);
  EXPECT_EQ(moved_to.steps(0), 1);
}

TEST(Rebind, AcceptsUnalignedWeights) {
  std::vector<unsigned char> first(7), second(7);
  const std::vector<f16> values = {f16(1.0f), f16(2.0f), f16(3.0f)};
  std::vector<f16> grad(3);
  const auto unaligned_copy = [&](std::vector<unsigned char>& bytes) {
    const TensorView unaligned = view(bytes.data() + 1, DType::kF16, 3);
    convert(view(values), unaligned);
    return unaligned;
  };
  AdamW optimizer({{"w", unaligned_copy(first), view(grad)}});
  const TensorView moved = unaligned_copy(second);
  std::memset(second.data() + 3, 0, 2);
  optimizer.rebind({{"w", moved, view(grad)}});
  EXPECT_EQ(optimizer.master(0)[0], 1.0f);
  EXPECT_EQ(optimizer.master(0)[1], 0.0f);
}

TEST(Rebind, KeepsTheStateWhenParametersMove) {
  std::vector<f16> w = {f16(1.0f), f16(2.0f)}, g = {f16(1.0f), f16(1.0f)}, g2 = g, w2 = w;
  AdamW optimizer({{"w", view(w), view(g)}}, {.lr = 0.1});
  optimizer.apply(1.0f, false);
  optimizer.rebind({{"w", view(w), view(g2)}});
  optimizer.apply(1.0f, true);
  EXPECT_EQ(static_cast<float>(g2[0]), 0.0f);
  EXPECT_EQ(static_cast<float>(g[0]), 1.0f);
  EXPECT_EQ(optimizer.steps(0), 2);
  refill(w2, w);
  const float exact = optimizer.master(0)[0];
  EXPECT_NE(exact, static_cast<float>(w[0]));
  w2[1] = f16(2.0f);
  optimizer.rebind({{"w", view(w2), view(g)}});
  EXPECT_EQ(optimizer.master(0)[0], exact) << "the value has not changed, so the master is kept";
  EXPECT_EQ(optimizer.master(0)[1], 2.0f) << "the value has changed";
  EXPECT_EQ(optimizer.steps(0), 2);
}

TEST(Rebind, RejectsDifferentParametersWithoutEffect) {
  std::vector<float> w = {1.0f, 2.0f}, g = {1.0f, 1.0f}, one = {1.0f};
  std::vector<f16> half(2);
  SGD optimizer({{"w", view(w), view(g)}});
  const auto expect_rejected = [&](const char* part, std::vector<Parameter> other) {
    expect_error(ErrorCode::kMismatch, part, [&] { optimizer.rebind(other); });
    EXPECT_EQ(optimizer.parameters()[0].weight.data, w.data());
  };
  expect_rejected("0 parameters", {});
  expect_rejected("is now 1 of f32", {{"w", view(one), TensorView{}}});
  expect_rejected("is now 2 of f16", {{"w", view(half), view(g)}});
  expect_rejected("gradient of 1", {{"w", view(w), view(one)}});
}

TEST(Gradients, FusedOptimizersRejectGradientsWithoutAWeight) {
  std::vector<float> g = {1.0f};
  expect_error(ErrorCode::kMismatch, "no weight", [&] { SGD({{"w", TensorView{}, view(g)}}); });
  SGD optimizer({{"w", TensorView{}, TensorView{}}});
  expect_error(ErrorCode::kMismatch, "no weight", [&] { optimizer.set_grad(0, view(g)); });
  expect_error(ErrorCode::kMismatch, "no weight", [&] {
    optimizer.rebind({{"w", TensorView{}, view(g)}});
  });
}

TEST(Gradients, AreUnchangedUnlessCleared) {
  std::vector<f16> weights(77, f16(1.0f)), grads(77, f16(0.5f));
  AdamW optimizer({{"w", view(weights), view(grads)}});
  const auto before = bytes_of(grads);
  optimizer.apply(1.0f, false);
  EXPECT_EQ(bytes_of(grads), before);
  optimizer.apply(1.0f, true);
  EXPECT_EQ(bytes_of(grads), std::vector<unsigned char>(77 * 2, 0));
}

TEST(Gradients, ZeroGradOverwritesNonFiniteValues) {
  std::vector<float> weights(3), grads = {kNan, kInf, 1.0f};
  SGD optimizer({{"w", view(weights), view(grads)}});
  optimizer.zero_grad();
  EXPECT_EQ(grads, (std::vector<float>{0.0f, 0.0f, 0.0f}));
}

}  // namespace
}  // namespace headroom
