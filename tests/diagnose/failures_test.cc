// The rules about what no scale cures: forward passes that fail, and bad batches.
#include <gtest/gtest.h>

#include "tests/diagnose/recorded.h"

namespace headroom {
namespace {

TEST(Diagnose, ForwardOverflowNeedsThreeBadLossesAtTheEnd) {
  const auto with = [](int count, double loss, int later) {
    Recorded run("dynamic");
    run.steps(40, 1024);
    for (int i = 0; i < count; ++i) run.skip(std::ldexp(1024.0, -i), 1, 1, loss);
    return run.steps(later, 32).found();
  };
  EXPECT_EQ(with(3, kNan, 0), "forward-overflow");
  EXPECT_EQ(with(8, HUGE_VAL, 0), "forward-overflow") << "and not skips-in-row";
  EXPECT_EQ(with(2, kNan, 0), "");
  EXPECT_EQ(with(4, 1.0, 0), "");
  EXPECT_EQ(with(3, kNan, 9000), "") << "three bad batches";
}

TEST(Diagnose, LossThatIsNotRecordedIsNoFailure) {
  EXPECT_EQ(Recorded("dynamic").steps(60, 1024, 16384, kNan).found(), "");
  EXPECT_EQ(Recorded("dynamic").steps(60, 1024).steps(10, 1024, 16384, kNan).found(), "")
      << "finite gradients";
  EXPECT_EQ(Recorded("dynamic").steps(60, 1024).steps(10, 1024, 16384, HUGE_VAL).found(),
            "forward-overflow");
  Recorded every_tenth("dynamic");
  for (int i = 0; i < 20; ++i) every_tenth.steps(1, 1024).steps(9, 1024, 16384, kNan);
  EXPECT_EQ(every_tenth.found(), "");
  for (int i = 0; i < 4; ++i) every_tenth.skip(std::ldexp(1024.0, -i), 1, 1, kNan);
  EXPECT_EQ(every_tenth.found(), "");
}

TEST(Diagnose, LossThatIsNotRecordedForSkippedStepsIsNoFailure) {
  Recorded run("dynamic");
  for (int i = 0; i < 6; ++i) run.skip(std::ldexp(65536.0, -i), 3, i % 2, kNan);
  EXPECT_EQ(run.found(), "");
  EXPECT_EQ(run.steps(40, 1024).found(), "");
  EXPECT_EQ(run.skip(2048, 1, 0, kNan).skip(1024, 1, 0, kNan).skip(512, 1, 0, kNan).found(), "");
}

TEST(Diagnose, SkipsOfALoopThatNeverRecordsItsLossAreNoFailureOfForward) {
  Recorded search("megatron");
  for (int i = 0; i < 18; ++i) search.skip(std::ldexp(0x1p32, -i), 1, 0, kNan);
  EXPECT_EQ(search.steps(300, 16384, 16384, kNan).found(), "");
  Recorded stuck("static:65536");
  stuck.steps(100, 65536, 16384, kNan);
  for (int i = 0; i < 9; ++i) stuck.skip(65536, 1, 0, kNan);
  EXPECT_EQ(stuck.found(), "at-floor");
  Recorded broken("none");
  for (int i = 0; i < 9; ++i) broken.skip(1, 0, 5, kNan);
  EXPECT_EQ(broken.found(), "forward-overflow");
}

TEST(Diagnose, NanAtAScaleThatMayBeTooHighIsNoFailureOfForward) {
  Recorded search("megatron");
  for (int i = 0; i < 16; ++i) search.skip(std::ldexp(0x1p32, -i), 0, 5);
  EXPECT_EQ(search.found(), "");
  for (int i = 16; i < 33; ++i) search.skip(std::ldexp(0x1p32, -i), 0, 5);
  EXPECT_EQ(search.found(), "forward-overflow");
  for (const double loss : {1.0, kNan}) {
    Recorded stuck("static:1000000000");
    for (int i = 0; i < 30; ++i) stuck.skip(1e9, 0, 5, loss);
    ASSERT_EQ(stuck.found(), "at-floor");
    EXPECT_EQ(stuck.diagnosis().findings[0].problem,
              "30 steps gave NaN at scale 1e+09, which is constant: it may be too high.");
  }
}

TEST(Diagnose, BadBatchesAreFoundWhileTheScaleClimbsBack) {
  Recorded run("dynamic:growth_interval=5");
  run.steps(40, 65536, 1024);
  for (int i = 0; i < 8; ++i) {
    run.skip(65536, 0, 5).steps(5, 32768, 512).skip(65536, 0, 5).steps(5, 32768, 512);
    run.steps(20, 65536, 1024);
  }
  EXPECT_EQ(run.found(), "bad-batches");
}

TEST(Diagnose, InfiniteGradientsAtScalesThatAreSmallEnoughAreNoMatterOfTheScale) {
  const auto with = [](int applied, int from, int to) {
    Recorded run("torch");
    run.steps(applied, std::ldexp(1.0, from));
    for (int exponent = from; exponent >= to; --exponent) run.skip(std::ldexp(1.0, exponent));
    return run.found();
  };
  EXPECT_EQ(with(500, 16, -4), "forward-overflow");
  EXPECT_EQ(with(500, 16, 0), "skips-in-row");
  EXPECT_EQ(with(0, 16, -16), "forward-overflow") << "from the first step on";
  EXPECT_EQ(with(0, 32, -4), "") << "the loss may be a large sum";
}

TEST(Diagnose, StepsThatFailFarFromOverflowHaveBadBatches) {
  const auto with = [](int times, double largest, int64_t infs, double loss) {
    Recorded run("torch");
    for (int i = 0; i < times; ++i) run.steps(20, 1024, largest).skip(1024, infs, 5, loss);
    return run.steps(20, 1024, largest).diagnosis();
  };
  const Diagnosis bad = with(8, 1024, 0, 1.0);
  ASSERT_EQ(bad.findings.at(0).rule, "bad-batches");
  EXPECT_EQ(
      bad.findings[0].problem.substr(0, 87),
      "8 of 188 steps gave NaN at a scale that was not too high (steps 21, 42, 63, ...): their");
  EXPECT_EQ(with(8, 32768, 1, kNan).findings.at(0).rule, "bad-batches") << "the loss is NaN";
  EXPECT_TRUE(with(8, 32768, 0, 1.0).findings.empty()) << "the scale may be too high";
  EXPECT_TRUE(with(8, 1024, 1, 1.0).findings.empty()) << "inf is the sign of a high scale";
  EXPECT_TRUE(with(4, 1024, 0, 1.0).findings.empty());
  Recorded pairs("torch");
  for (int i = 0; i < 4; ++i) pairs.steps(40, 1024).skip(1024, 1, 2, kNan).skip(512, 1, 2, kNan);
  EXPECT_EQ(pairs.steps(40, 64).found(), "bad-batches");
  Recorded rare("torch");
  for (int i = 0; i < 8; ++i) rare.steps(300, 1024, 1024).skip(1024, 0, 5);
  EXPECT_EQ(rare.found(), "");
}

TEST(Diagnose, ABatchIsBlamedOnlyAtAScaleThatFitted) {
  Recorded run("dynamic:growth_interval=150");  // gradients of activations bound the scale
  for (int i = 0; i < 8; ++i) run.steps(150, 65536, 4000).skip(131072, 0, 5);
  EXPECT_EQ(run.found(), "");
  Recorded bad("dynamic:growth_interval=150");
  for (int i = 0; i < 8; ++i) bad.steps(150, 65536, 4000).skip(65536, 0, 5);
  EXPECT_EQ(bad.found(), "bad-batches");
}

TEST(Diagnose, NanGradientsAtEveryScaleAreNoMatterOfTheScale) {
  const auto with = [](int64_t infs, int falls, bool recovers) {
    Recorded run("dynamic");
    run.steps(40, 65536);
    for (int i = 0; i < falls; ++i) run.skip(std::ldexp(65536.0, -i), infs, 5);
    if (recovers) run.steps(5, 32);
    return run.found();
  };
  EXPECT_EQ(with(0, 12, false), "forward-overflow");
  EXPECT_EQ(with(1, 12, false), "skips-in-row");
  EXPECT_EQ(with(0, 12, true), "skips-in-row");
  EXPECT_EQ(with(0, 4, false), "");
}

TEST(Diagnose, BadBatchIsTheStepThatFailsInEveryAttempt) {
  Recorded run("dynamic");
  run.steps(54, 1024).skip(1024, 0, 3).steps(5, 512).rewind(50);
  run.steps(4, 1024).skip(1024, 0, 3).steps(9, 512);
  EXPECT_EQ(run.found(), "same-step");
  EXPECT_NE(run.diagnosis().findings[0].problem.find("Step 55 gave NaN in all 2 attempts"),
            std::string::npos);
  run.rewind(50).steps(30, 1024);
  EXPECT_EQ(run.found(), "") << "the third attempt succeeded";
  run.rewind(50).steps(4, 1024).skip(1024, 0, 3).steps(9, 512);
  EXPECT_EQ(run.found(), "") << "not every attempt failed";
  Recorded grown("dynamic");  // the scale grows before step 55 in both attempts
  grown.steps(54, 1024).skip(2048, 3, 0).steps(5, 1024).rewind(50);
  grown.steps(4, 1024).skip(2048, 3, 0).steps(9, 1024);
  EXPECT_EQ(grown.found(), "");
}

TEST(Diagnose, EarlierAttemptsAreKeptWhenTheRunGoesFurtherBack) {
  Recorded run("dynamic");
  run.steps(54, 1024).skip(1024, 0, 3).rewind(50).steps(4, 1024).skip(1024, 0, 3);
  run.rewind(20).steps(34, 1024).skip(1024, 0, 3).steps(3, 512);
  EXPECT_NE(run.diagnosis().findings.at(0).problem.find("in all 3 attempts"), std::string::npos);
}

}  // namespace
}  // namespace headroom
