// Changing the scale and the policy of a scaler, and options of a step.
#include "decide/transition.h"
#include "tests/scaler/support.h"

namespace headroom {
namespace {

void clean_step(GradScaler& scaler, OneWeight& loop) {
  scaler.scale(1.0f);
  scaler.step(loop.optimizer);
  scaler.update();
}

TEST(SetScale, RejectsInvalidValuesAndPendingGradients) {
  OneWeight loop;
  GradScaler scaler;
  scaler.set_scale(1024.0f);
  EXPECT_EQ(scaler.get_scale(), 1024.0f);
  for (const float bad : {0.0f, -1.0f, kNan, kInf, 0.5f, 0x1p25f}) {
    expect_error(ErrorCode::kInvalidArgument, "cannot be set", [&] { scaler.set_scale(bad); });
  }
  EXPECT_EQ(scaler.get_scale(), 1024.0f);
  scaler.scale(1.0f);
  expect_wrong_order("discard()", [&] { scaler.set_scale(512.0f); });
  EXPECT_EQ(scaler.get_scale(), 1024.0f);
}

TEST(SetScale, HeadroomRuleRequiresPowersOfTwo) {
  GradScaler scaler{HeadroomScale{}};
  expect_error(ErrorCode::kInvalidArgument, "powers of two", [&] { scaler.set_scale(1000.0f); });
  internal::ScaleRecord record = internal::ScaleStateAccess::record(scaler.state());
  record.numbers.scale = record.numbers.dynamic.pending = 1000.0f;
  expect_error(ErrorCode::kBadState, "power of two",
               [&] { scaler.load_state(internal::ScaleStateAccess::make(record)); });
  scaler.set_scale(1024.0f);
  GradScaler other;
  other.set_scale(1000.0f);
  expect_error(ErrorCode::kInvalidArgument, "powers of two",
               [&] { other.set_policy(HeadroomScale{}); });
}

TEST(SetPolicy, KeepsTheScaleAndValidCounters) {
  OneWeight loop;
  GradScaler scaler(DynamicScale{.growth_interval = 10});
  for (int i = 0; i < 5; ++i) clean_step(scaler, loop);
  DynamicScale policy = scaler.policy().dynamic();
  policy.growth_interval = 3;
  scaler.set_policy(policy);
  EXPECT_EQ(scaler.get_scale(), 65536.0f);
  EXPECT_NO_THROW(scaler.load(scaler.save()));
  clean_step(scaler, loop);
  EXPECT_EQ(scaler.get_scale(), 131072.0f);
  policy.max_scale = 65536.0f;
  expect_error(ErrorCode::kInvalidArgument, "131072", [&] { scaler.set_policy(policy); });
  policy.backoff_factor = 2.0;
  expect_error(ErrorCode::kInvalidArgument, "backoff", [&] { scaler.set_policy(policy); });
  EXPECT_EQ(scaler.policy().max_scale(), 16777216.0f);
}

TEST(SetPolicy, LeavesALoadableState) {
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

TEST(SetPolicy, ShorterHeadroomIntervalLeavesALoadableState) {
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

TEST(SetScale, KeepsTheCountsAsTorchDoes) {
  OneWeight loop;
  GradScaler scaler(DynamicScale{.growth_interval = 3});
  clean_step(scaler, loop);
  clean_step(scaler, loop);
  scaler.set_scale(1024.0f);
  clean_step(scaler, loop);
  EXPECT_EQ(scaler.get_scale(), 2048.0f);
  EXPECT_EQ(scaler.state().steps(), 3);
}

TEST(SetScale, EndsTheRetriesOfABatchAndTheirBackoff) {
  OneWeight loop;
  GradScaler scaler(preset("headroom-retry"));
  const auto overflow = [&] {
    scaler.scale(1.0f);
    loop.grad[0] = kInf;
    scaler.step(loop.optimizer);
    scaler.update();
  };
  for (int i = 0; i < 3; ++i) overflow();
  ASSERT_TRUE(scaler.retry());
  scaler.set_scale(1024.0f);
  EXPECT_FALSE(scaler.retry());
  overflow();
  EXPECT_EQ(scaler.get_scale(), 512.0f) << "the back-off starts from the scale that was set";
}

TEST(StepOptions, InvalidMaxNormIsRejectedWithoutEffect) {
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

}  // namespace
}  // namespace headroom
