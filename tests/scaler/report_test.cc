// Reports and alarms.
#include "tests/scaler/support.h"

namespace headroom {
namespace {

TEST(ScalerReport, IsAvailableImmediatelyOnTheCpu) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  SGD optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  EXPECT_FALSE(scaler.try_report().has_value());
  expect_error(ErrorCode::kWrongOrder, "before any step()", [&] { scaler.report(); });
  scaler.scale(1.0f);
  const StepReport report = scaler.step(optimizer);
  EXPECT_FALSE(report.pending);
  EXPECT_EQ(scaler.report().to_string(), report.to_string());
  EXPECT_EQ(scaler.try_report(optimizer)->steps, 1);
}

TEST(ScalerReport, PendingReportNamesTheCallsThatCompleteIt) {
  StepReport report;
  report.pending = true;
  EXPECT_EQ(report.to_string(), "pending: not known yet; call report() or try_report()");
}

TEST(ScalerReport, ThrowingStepKeepsThePreviousReport) {
  struct ThrowingOptimizer : Optimizer {
    explicit ThrowingOptimizer(std::vector<Parameter> parameters)
        : Optimizer(std::move(parameters)) {}
    void apply(float, bool) override { throw std::runtime_error("apply failed"); }
  };
  OneWeight loop;
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  ThrowingOptimizer other({{"other", view(weight), view(grad)}});
  GradScaler scaler;
  scaler.scale(1.0f);
  const StepReport first = scaler.step(loop.optimizer);
  EXPECT_THROW(scaler.step(other), std::runtime_error);
  EXPECT_EQ(scaler.report().to_string(), first.to_string());
}

TEST(Alarm, IsThrownAtTheFloorAndTrainingCanContinue) {
  Loop loop;
  GradScaler scaler(DynamicScale{.init_scale = 2.0f});
  const auto overflow = [&] {
    loop.backward(scaler.scale(1.0f), kInf);
    scaler.step(loop.optimizer);
    scaler.update();
  };
  overflow();
  EXPECT_EQ(scaler.get_scale(), 1.0f);
  expect_error(ErrorCode::kScaleCollapsed, "The last culprit was w: 3 inf, 0 nan", overflow);
  EXPECT_EQ(scaler.state().skipped(), 2);
  loop.backward(scaler.scale(1.0f), 0.5f);
  EXPECT_TRUE(scaler.step(loop.optimizer).applied);
  scaler.update();
}

TEST(Alarm, IsPassedToTheCallback) {
  Loop loop;
  std::vector<AlarmReport> alarms;
  GradScaler scaler(DynamicScale{.max_skips_in_row = 2},
                    {.on_alarm = [&](const AlarmReport& alarm) { alarms.push_back(alarm); }});
  for (int i = 0; i < 3; ++i) {
    loop.backward(scaler.scale(1.0f), kInf);
    scaler.step(loop.optimizer);
    scaler.update();
  }
  ASSERT_EQ(alarms.size(), 2u);
  EXPECT_EQ(alarms[0].alarm, Alarm::kSkipsInRow);
  EXPECT_EQ(alarms[0].skips_in_row, 2);
  EXPECT_EQ(alarms[1].scale, 16384.0f) << "the scale of the skipped step, not the next one";
  EXPECT_NE(alarms[1].sentence.find("3 steps in a row were skipped, the last at a scale of 16384; "
                                    "the limit is 2"),
            std::string::npos);
  EXPECT_NE(alarms[1].sentence.find("Scaling cannot help here"), std::string::npos);
}

TEST(Alarm, OfAConstantScaleAsksForASmallerOne) {
  Loop loop;
  std::string sentence;
  GradScaler scaler(StaticScale{.scale = 1024.0f, .max_skips_in_row = 2},
                    {.on_alarm = [&](const AlarmReport& alarm) { sentence = alarm.sentence; }});
  for (int i = 0; i < 2; ++i) {
    loop.backward(scaler.scale(1.0f), kInf);
    scaler.step(loop.optimizer);
    scaler.update();
  }
  EXPECT_NE(sentence.find("The scale is constant: use a smaller one"), std::string::npos);
  EXPECT_EQ(sentence.find("Scaling cannot help"), std::string::npos);
}

}  // namespace
}  // namespace headroom
