// torch's stages: which call may follow which, for one optimizer and for several.
#include "decide/transition.h"
#include "tests/support.h"

namespace headroom {
namespace {

struct OneWeight {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  SGD optimizer{{{"w", view(weight), view(grad)}}};
};

void wrong_order(const std::string& part, const std::function<void()>& call) {
  expect_error(ErrorCode::kWrongOrder, part, call);
}

TEST(Order, NothingBeforeTheFirstScale) {
  OneWeight loop;
  GradScaler scaler;
  wrong_order("unscale_() was called before any scale()", [&] { scaler.unscale_(loop.optimizer); });
  wrong_order("step() was called before any scale()", [&] { scaler.step(loop.optimizer); });
  wrong_order("no optimizer was stepped", [&] { scaler.update(); });
  EXPECT_EQ(loop.weight[0], 1.0f);
}

TEST(Order, UnscaleOnceAndNotAfterStep) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.unscale_(loop.optimizer);
  wrong_order("already unscaled", [&] { scaler.unscale_(loop.optimizer); });
  scaler.step(loop.optimizer);
  wrong_order("after step()", [&] { scaler.unscale_(loop.optimizer); });
}

TEST(Order, StepOnceBetweenUpdates) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  wrong_order("after step()", [&] { scaler.step(loop.optimizer); });
  scaler.update();
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
}

TEST(Order, UpdateNeedsACheck) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  wrong_order("no optimizer was stepped", [&] { scaler.update(); });
  scaler.unscale_(loop.optimizer);
  scaler.update();  // a user may look at the gradients and decide not to step
  wrong_order("no optimizer was stepped", [&] { scaler.update(); });
}

TEST(Order, MicroBatchesThatGoOnOverAnUpdateAddUpRight) {
  OneWeight often, seldom;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  const auto round = [&](bool both) {
    const float scaled = scaler.scale(1.0f);
    often.grad[0] = 0.25f * scaled;
    seldom.grad[0] += 0.5f * scaled;
    EXPECT_EQ(scaler.step(often.optimizer).grad_norm, 0.25);
    double norm = 0.0;
    if (both) {
      norm = scaler.step(seldom.optimizer, {.clear_grads = ClearGrads::kAlways}).grad_norm;
    }
    scaler.update();
    return norm;
  };
  seldom.grad[0] = 0.0f;
  EXPECT_EQ(round(true), 0.5);
  round(false);  // the scale doubles twice while the second optimizer's gradients wait
  round(false);
  EXPECT_EQ(round(true), 1.5);
}

TEST(Order, ALossBetweenStepAndUpdateIsTakenAlong) {
  OneWeight loop;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  loop.grad[0] = scaler.scale(1.0f);
  scaler.step(loop.optimizer, {.clear_grads = ClearGrads::kAlways});
  loop.grad[0] += 0.5f * scaler.scale(1.0f);  // the first micro-batch of the next step
  scaler.update();
  loop.grad[0] += 0.25f * scaler.scale(1.0f);
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.75);
}

TEST(Order, GradientsThatWereUnscaledAreNotUnscaledAgain) {
  OneWeight loop, other;
  GradScaler scaler;
  loop.grad[0] = 0.5f * scaler.scale(1.0f);
  scaler.unscale_(loop.optimizer);
  wrong_order("already unscaled", [&] { scaler.unscale_(loop.optimizer); });
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.5);
  scaler.update();
  loop.grad[0] = 0.25f * scaler.scale(1.0f);
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.25) << "a new loss, a new gradient";
}

TEST(Order, UnscaledGradientsThatAreNotSteppedWaitLikeOthers) {
  OneWeight loop, other;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  loop.grad[0] = 0.5f * scaler.scale(1.0f);
  scaler.unscale_(loop.optimizer);
  for (int round = 0; round < 2; ++round) {
    other.grad[0] = 0.5f * scaler.scale(1.0f);  // a loss of the other alone
    scaler.step(other.optimizer);
    scaler.update();
    EXPECT_EQ(loop.grad[0], 0.5f * scaler.get_scale());
  }
  loop.grad[0] += 0.25f * scaler.scale(1.0f);  // of both
  EXPECT_EQ(scaler.unscale_(loop.optimizer).norm() / scaler.get_scale(), 0.75);
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.75);
}

TEST(Order, GradientsThatWaitHaveTheScaleOfTheirBackwardThoughItDidNotMove) {
  OneWeight often, seldom;
  GradScaler scaler;
  scaler.scale(1.0f);
  often.grad[0] = kInf;
  scaler.step(often.optimizer);
  scaler.step(seldom.optimizer);
  scaler.update();  // to 2^15
  often.grad[0] = seldom.grad[0] = 0.5f * scaler.scale(1.0f);
  scaler.step(often.optimizer);
  scaler.update();  // stays
  EXPECT_EQ(scaler.step(seldom.optimizer).grad_norm, 0.5);
}

TEST(Order, AfterDiscardingNothingIsUnscaledAnyMore) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  loop.grad[0] = kInf;
  EXPECT_FALSE(scaler.unscale_(loop.optimizer).ok());
  scaler.discard();
  loop.grad[0] = 0.5f * scaler.scale(1.0f);
  const StepReport report = scaler.step(loop.optimizer);
  EXPECT_TRUE(report.applied);
  EXPECT_EQ(report.grad_norm, 0.5);
}

TEST(Order, TwoOptimizersMayTakeTurns) {
  OneWeight generator, discriminator;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  for (int i = 0; i < 6; ++i) {
    for (OneWeight* loop : {&discriminator, &generator}) {
      loop->grad[0] = 0.5f * scaler.scale(1.0f);  // backward overwrites
      EXPECT_EQ(scaler.step(loop->optimizer).grad_norm, 0.5);
      scaler.update();
    }
  }
}

TEST(Order, SavingBelongsAfterUpdate) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  wrong_order("save()", [&] { scaler.save(); });
  scaler.update();
  EXPECT_NO_THROW(scaler.save());
}

TEST(Order, LoadingWaitsForGradientsOrTheirDiscarding) {
  OneWeight loop;
  GradScaler scaler;
  const std::string saved = scaler.save();
  scaler.scale(1.0f);
  wrong_order("discard()", [&] { scaler.load(saved); });
  wrong_order("discard()", [&] { scaler.load_state(scaler.state()); });
  scaler.discard();
  EXPECT_NO_THROW(scaler.load(saved));
}

TEST(Order, WithoutGradientsUnscalingIsNothingToUpdateBy) {
  std::vector<float> weight = {1.0f};
  AdamW optimizer({{"w", view(weight), TensorView{}}});
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  scaler.scale(1.0f);
  EXPECT_NO_THROW(scaler.unscale_(optimizer));
  wrong_order("no optimizer was stepped", [&] { scaler.update(); });
}

TEST(Order, AStepThatThrowsLeavesTheReportOfTheOneBefore) {
  struct Throwing : Optimizer {
    explicit Throwing(std::vector<Parameter> parameters) : Optimizer(std::move(parameters)) {}
    void apply(float, bool) override { throw std::runtime_error("no"); }
  };
  OneWeight loop;
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  Throwing other({{"other", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  const StepReport first = scaler.step(loop.optimizer);
  EXPECT_THROW(scaler.step(other), std::runtime_error);
  EXPECT_EQ(scaler.report().to_string(), first.to_string());
}

TEST(Order, AnOptimizerWithoutGradientsIsNotStepped) {
  std::vector<float> weight = {1.0f};
  AdamW optimizer({{"w", view(weight), TensorView{}}});
  AdamW none({});
  GradScaler scaler;
  scaler.scale(1.0f);
  wrong_order("none of whose parameters", [&] { scaler.step(optimizer); });
  wrong_order("none of whose parameters", [&] { scaler.step(none); });
  EXPECT_EQ(scaler.state().steps(), 0);
}

TEST(Order, AMovedOptimizerIsTheSameOne) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  AdamW first({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(first);
  AdamW second = std::move(first);
  wrong_order("after step()", [&] { scaler.step(second); });
  scaler.update();
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(second).applied);
  const auto moved_from = [](const std::function<void()>& call) {
    expect_error(ErrorCode::kInvalidArgument, "was moved from", call);
  };
  moved_from([&] { scaler.step(first); });    // NOLINT
  moved_from([&] { scaler.report(first); });  // NOLINT
}

TEST(Order, AnOptimizerThatIsNotKnownYetIsRefusedInARoundWithoutALoss) {
  OneWeight first, second;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  const float scaled = scaler.scale(1.0f);
  first.grad[0] = second.grad[0] = 0.5f * scaled;
  scaler.step(first.optimizer);
  scaler.update();  // the scale doubles; the scaler has not seen the second optimizer yet
  wrong_order("before any scale() in this round", [&] { scaler.step(second.optimizer); });
  EXPECT_EQ(second.weight[0], 1.0f);
}

TEST(SeveralOptimizers, EachDecidesForItselfAndTheScaleIsShared) {
  OneWeight good, bad;
  GradScaler scaler;
  scaler.scale(1.0f);
  bad.grad[0] = kInf;
  EXPECT_FALSE(scaler.step(bad.optimizer).applied);
  EXPECT_TRUE(scaler.step(good.optimizer).applied) << "a later clean one does not hide it";
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768.0f);
  EXPECT_EQ(scaler.state().skipped(), 1);
}

TEST(SeveralOptimizers, AParameterInTwoIsRefused) {
  OneWeight loop;
  std::vector<float> other_grad = {1.0f};
  AdamW other({{"same", view(loop.weight), view(other_grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  const float before = loop.weight[0];
  expect_error(ErrorCode::kInvalidArgument, "another optimizer", [&] { scaler.step(other); });
  EXPECT_EQ(loop.weight[0], before);
}

TEST(SeveralOptimizers, OneThatWasRefusedLeavesNothingBehind) {
  OneWeight loop;
  std::vector<float> other_grad = {1.0f}, next_grad = {0.0f};
  AdamW other({{"same", view(loop.weight), view(other_grad)}});
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  expect_error(ErrorCode::kInvalidArgument, "another optimizer", [&] { scaler.step(other); });
  loop.grad[0] = 0.5f * scaler.scale(1.0f);
  scaler.update();  // takes along what waits, once
  EXPECT_EQ(other_grad[0], 1.0f);
  EXPECT_EQ(scaler.step(loop.optimizer).grad_norm, 0.5);
  scaler.update();
  loop.optimizer.set_grad(0, view(next_grad));
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(loop.optimizer).applied);
}

TEST(SeveralOptimizers, AParameterThatIsAddedLaterIsFoundToo) {
  OneWeight first, second;
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(first.optimizer);
  scaler.step(second.optimizer);
  scaler.update();
  std::vector<float> grad = {1.0f};
  second.optimizer.add_group({{"again", view(first.weight), view(grad)}}, {});
  scaler.scale(1.0f);
  expect_error(ErrorCode::kInvalidArgument, "another optimizer",
               [&] { scaler.step(second.optimizer); });
}

TEST(SeveralOptimizers, AGradientBufferMayBeHandedOn) {
  OneWeight first, second;
  std::vector<float> other = {1.0f};
  GradScaler scaler;
  scaler.scale(1.0f);
  scaler.step(first.optimizer);
  scaler.step(second.optimizer);
  scaler.update();
  first.optimizer.set_grad(0, view(other));
  second.optimizer.set_grad(0, view(first.grad));
  scaler.scale(1.0f);
  EXPECT_TRUE(scaler.step(second.optimizer).applied);
  EXPECT_TRUE(scaler.step(first.optimizer).applied);
}

TEST(SeveralOptimizers, ANewOptimizerMayTakeOverFromOneThatIsGone) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  GradScaler scaler;
  for (int i = 0; i < 3; ++i) {
    SGD optimizer({{"w", view(weight), view(grad)}});
    scaler.scale(1.0f);
    EXPECT_TRUE(scaler.step(optimizer).applied);
    scaler.update();
  }
}

TEST(NewScale, IsSetWithinBoundsOnly) {
  OneWeight loop;
  GradScaler scaler;
  scaler.set_scale(1024.0f);
  EXPECT_EQ(scaler.get_scale(), 1024.0f);
  for (const float bad : {0.0f, -1.0f, kNan, kInf, 0.5f, 0x1p25f}) {
    expect_error(ErrorCode::kInvalidArgument, "cannot be set", [&] { scaler.set_scale(bad); });
  }
  EXPECT_EQ(scaler.get_scale(), 1024.0f);
  scaler.scale(1.0f);
  wrong_order("discard()", [&] { scaler.set_scale(512.0f); });
  EXPECT_EQ(scaler.get_scale(), 1024.0f);
}

TEST(NewScale, IsAPowerOfTwoWhereTheRuleNeedsOne) {
  GradScaler scaler{HeadroomScale{}};
  expect_error(ErrorCode::kInvalidArgument, "powers of two", [&] { scaler.set_scale(1000.0f); });
  internal::ScaleRecord record = scaler.state().record();
  record.numbers.scale = record.numbers.dynamic.pending = 1000.0f;
  expect_error(ErrorCode::kBadState, "power of two",
               [&] { scaler.load_state(ScaleState(record)); });
  scaler.set_scale(1024.0f);
  GradScaler other;
  other.set_scale(1000.0f);
  expect_error(ErrorCode::kInvalidArgument, "powers of two",
               [&] { other.set_policy(HeadroomScale{}); });
}

TEST(NewPolicy, KeepsTheScaleAndWhatCountsAreStillPossible) {
  OneWeight loop;
  GradScaler scaler(DynamicScale{.growth_interval = 10});
  const auto clean_step = [&] {
    scaler.scale(1.0f);
    scaler.step(loop.optimizer);
    scaler.update();
  };
  for (int i = 0; i < 5; ++i) clean_step();
  DynamicScale policy = scaler.policy().dynamic();
  policy.growth_interval = 3;
  scaler.set_policy(policy);
  EXPECT_EQ(scaler.get_scale(), 65536.0f);
  EXPECT_NO_THROW(scaler.load(scaler.save()));
  clean_step();
  EXPECT_EQ(scaler.get_scale(), 131072.0f);
  policy.max_scale = 65536.0f;
  expect_error(ErrorCode::kInvalidArgument, "131072", [&] { scaler.set_policy(policy); });
  policy.backoff_factor = 2.0;
  expect_error(ErrorCode::kInvalidArgument, "backoff", [&] { scaler.set_policy(policy); });
  EXPECT_EQ(scaler.policy().max_scale(), 16777216.0f);
}

TEST(NewPolicy, LeavesAStateThatCanBeLoaded) {
  for (const char* from : {"deepspeed", "flax", "megatron", "headroom", "mxnet"}) {
    for (const char* to : {"torch", "headroom", "megatron", "fairseq", "flax"}) {
      ScalePolicy first = preset(from);
      first.set("init_scale", 1024.0);
      GradScaler scaler(first), other;
      scaler.set_policy(preset(to));
      EXPECT_NO_THROW(other.load(scaler.save())) << from << " " << to;
    }
  }
}

TEST(NewPolicy, ThatShortensTheHeadroomRulesIntervalLeavesAStateThatCanBeLoaded) {
  OneWeight loop;
  GradScaler scaler(HeadroomScale{.growth_interval = 100}), other;
  for (int i = 0; i < 90; ++i) {
    loop.grad[0] = 1e-3f * scaler.scale(1.0f);
    scaler.step(loop.optimizer);
    scaler.update();
  }
  scaler.set_policy(HeadroomScale{.growth_interval = 2});
  EXPECT_NO_THROW(other.load(scaler.save()));
}

TEST(NewScale, StartsTheGrowthCountAgain) {
  OneWeight loop;
  GradScaler scaler(DynamicScale{.growth_interval = 3});
  const auto clean_step = [&] {
    scaler.scale(1.0f);
    scaler.step(loop.optimizer);
    scaler.update();
  };
  clean_step();
  clean_step();
  scaler.set_scale(1024.0f);
  clean_step();
  EXPECT_EQ(scaler.get_scale(), 1024.0f);
  EXPECT_EQ(scaler.state().steps(), 3);
}

TEST(Options, AnImpossibleNormIsRefusedBeforeAnythingHappens) {
  OneWeight loop;
  GradScaler scaler;
  scaler.scale(1.0f);
  for (const float bad : {-1.0f, kNan, kInf}) {
    expect_error(ErrorCode::kInvalidArgument, "max_norm",
                 [&] { scaler.step(loop.optimizer, {.max_norm = bad}); });
  }
  EXPECT_TRUE(scaler.step(loop.optimizer).applied);
  EXPECT_THROW(GradScaler(DynamicScale{.init_scale = 0.0f}), Error);
}

// An optimizer of the user's own under the scaler.
class Mine : public Optimizer {
 public:
  explicit Mine(std::vector<Parameter> parameters) : Optimizer(std::move(parameters)) {}
  void apply(float multiplier, bool) override {
    if (fail) throw std::runtime_error("device lost");
    multipliers.push_back(multiplier);
  }
  void skipped(const std::string& culprit) override {
    if (fail) throw std::runtime_error("disk full");
    culprits.push_back(culprit);
  }
  std::vector<float> multipliers;
  std::vector<std::string> culprits;
  bool fail = false;
};

TEST(OwnOptimizer, IsCalledOnlyForGoodSteps) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  Mine mine({{"w", view(weight), view(grad)}});
  GradScaler scaler(StaticScale{4.0f});
  scaler.scale(1.0f);
  scaler.step(mine);
  scaler.update();
  scaler.scale(1.0f);
  grad[0] = kNan;
  scaler.step(mine);
  EXPECT_EQ(mine.multipliers, std::vector<float>{0.25f});
  EXPECT_EQ(mine.culprits, std::vector<std::string>{"w: 0 inf, 1 nan"});
}

TEST(OwnOptimizer, MayThrowAndTheStepMayBeTriedAgain) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  Mine mine({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  mine.fail = true;
  EXPECT_THROW(scaler.step(mine), std::runtime_error);
  mine.fail = false;
  EXPECT_TRUE(scaler.step(mine).applied);
  scaler.update();
  scaler.scale(1.0f);
  grad[0] = kInf;
  mine.fail = true;
  EXPECT_THROW(scaler.step(mine), std::runtime_error);
  mine.fail = false;
  EXPECT_FALSE(scaler.step(mine).applied) << "the overflow is still there";
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768.0f);
}

}  // namespace
}  // namespace headroom
