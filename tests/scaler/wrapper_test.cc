// Optimizers that wrap the tensors of a framework.
#include "tests/support.h"

namespace headroom {
namespace {

// A framework that moves its tensors: refresh() comes before every use, gradients_changed() after
// every write.
TEST(Wrapper, IsAskedBeforeItsParametersAreUsed) {
  struct Moving : Optimizer {
    Moving() : Optimizer({}) {}
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
  Moving optimizer;
  GradScaler scaler(DynamicScale{.growth_interval = 1});
  optimizer.memory[0][0] = scaler.scale(1.0f);
  scaler.step(optimizer);
  EXPECT_EQ(optimizer.refreshed, 1);
  EXPECT_EQ(optimizer.changed, 0);
  optimizer.used = 1;
  optimizer.memory[1][0] = scaler.scale(1.0f);
  scaler.update();  // the gradient waits, and has moved
  EXPECT_EQ(optimizer.memory[1][0], 131072.0f);
  EXPECT_EQ(optimizer.memory[0][0], 65536.0f);
  EXPECT_EQ(optimizer.changed, 1);
  EXPECT_EQ(scaler.unscale_(optimizer).norm(), 131072.0);
  EXPECT_EQ(optimizer.memory[1][0], 1.0f);
  EXPECT_EQ(optimizer.changed, 2);
}

}  // namespace
}  // namespace headroom
