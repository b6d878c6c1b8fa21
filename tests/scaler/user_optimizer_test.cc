// Optimizers that users derive from Optimizer.
#include "tests/scaler/support.h"

namespace headroom {
namespace {

// Records its calls, or throws from them.
class RecordingOptimizer : public Optimizer {
 public:
  explicit RecordingOptimizer(std::vector<Parameter> parameters)
      : Optimizer(std::move(parameters)) {}
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

TEST(UserOptimizer, IsAppliedOnlyForFiniteGradients) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  RecordingOptimizer optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler(StaticScale{4.0f});
  scaler.scale(1.0f);
  scaler.step(optimizer);
  scaler.update();
  scaler.scale(1.0f);
  grad[0] = kNan;
  scaler.step(optimizer);
  EXPECT_EQ(optimizer.multipliers, std::vector<float>{0.25f});
  EXPECT_EQ(optimizer.culprits, std::vector<std::string>{"w: 0 inf, 1 nan"});
}

TEST(UserOptimizer, StepCanBeRetriedAfterAnException) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  RecordingOptimizer optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  optimizer.fail = true;
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  optimizer.fail = false;
  EXPECT_TRUE(scaler.step(optimizer).applied);
  scaler.update();
  scaler.scale(1.0f);
  grad[0] = kInf;
  optimizer.fail = true;
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  optimizer.fail = false;
  EXPECT_FALSE(scaler.step(optimizer).applied) << "the overflow is found again";
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768.0f);
}

// A framework may move its tensors: refresh() is called before every use and gradients_changed()
// after every write.
TEST(UserOptimizer, IsRefreshedBeforeEachUseAndNotifiedAfterWrites) {
  struct MovingOptimizer : Optimizer {
    MovingOptimizer() : Optimizer({}) {}
    void apply(float, bool) override { ++applied; }
    void refresh() override {
      rebind({{"w", {}, view(memory[used])}});
      ++refreshed;
    }
    void gradients_changed() override { ++changed; }
    std::vector<float> memory[2] = {{1.0f}, {1.0f}};
    size_t used = 0;
    int applied = 0, refreshed = 0, changed = 0;
  };
  MovingOptimizer optimizer;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  optimizer.memory[0][0] = scaler.scale(1.0f);
  scaler.step(optimizer);
  EXPECT_EQ(optimizer.refreshed, 1);
  EXPECT_EQ(optimizer.changed, 0);
  optimizer.used = 1;
  optimizer.memory[1][0] = scaler.scale(1.0f);
  scaler.update();  // rescales the pending gradient at its new address
  EXPECT_EQ(optimizer.memory[1][0], 131072.0f);
  EXPECT_EQ(optimizer.memory[0][0], 65536.0f);
  EXPECT_EQ(optimizer.changed, 1);
  EXPECT_EQ(scaler.unscale_(optimizer).norm(), 131072.0);
  EXPECT_EQ(optimizer.memory[1][0], 1.0f);
  EXPECT_EQ(optimizer.changed, 2);
}

// An optimizer whose gradients_changed() throws once.
struct NotifiedOptimizer : Optimizer {
  explicit NotifiedOptimizer(std::vector<Parameter> parameters)
      : Optimizer(std::move(parameters)) {}
  void apply(float, bool) override { ++applied; }
  void gradients_changed() override {
    if (std::exchange(fail, false)) throw std::runtime_error("device lost");
  }
  int applied = 0;
  bool fail = false;
};

TEST(UserOptimizer, StepIsCompleteIfTheNotificationThrows) {
  std::vector<float> grad = {1.0f};
  NotifiedOptimizer optimizer({{"w", {}, view(grad)}});
  GradScaler scaler(StaticScale{4.0f});
  scaler.scale(1.0f);
  optimizer.fail = true;
  const StepOptions clearing = {.clear_grads = ClearGrads::kAlways};
  EXPECT_THROW(scaler.step(optimizer, clearing), std::runtime_error);
  expect_error(ErrorCode::kWrongOrder, "step()", [&] { scaler.step(optimizer, clearing); });
  EXPECT_EQ(optimizer.applied, 1);
  EXPECT_TRUE(scaler.report().applied);
}

TEST(UserOptimizer, UpdateIsCompleteIfTheNotificationThrows) {
  std::vector<float> grad = {4.0f}, waiting = {4.0f};
  NotifiedOptimizer stepped({{"w", {}, view(grad)}}), later({{"v", {}, view(waiting)}});
  GradScaler scaler(DynamicScale{.init_scale = 4.0f, .growth_interval = 1});
  scaler.scale(1.0f);
  scaler.step(stepped);
  scaler.step(later);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8.0f);
  scaler.scale(1.0f);
  scaler.step(stepped);
  waiting[0] = 8.0f;
  later.fail = true;
  EXPECT_THROW(scaler.update(), std::runtime_error);
  EXPECT_EQ(scaler.get_scale(), 16.0f);
  EXPECT_EQ(waiting[0], 16.0f);
  expect_error(ErrorCode::kWrongOrder, "update()", [&] { scaler.update(); });
  EXPECT_EQ(waiting[0], 16.0f);
}

}  // namespace
}  // namespace headroom
