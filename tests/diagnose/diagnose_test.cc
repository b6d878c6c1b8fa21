// The rules on histories made for them: where each must speak, and where it must not. Recorded runs
// of the trainer are in tests/cli/diagnose_test.py.
#include <gtest/gtest.h>

#include "tests/diagnose/recorded.h"

namespace headroom {
namespace {

TEST(Diagnose, HealthyRunGetsNoAdvice) {
  Recorded run("dynamic");
  run.skip(65536).skip(32768).steps(50, 16384).layers(0.1).steps(50, 16384).layers(0.2);
  EXPECT_EQ(run.found(), "");
  EXPECT_EQ(
      run.diagnosis().summary,
      "Nothing is wrong: 2 of 102 steps were skipped, the scale ended at 2^14 with room for 1 "
      "doubling.");
}

TEST(Diagnose, RoomThatOneFailureBoundsIsNotPrinted) {
  Recorded run("dynamic");
  run.steps(90, 65536, 64.0).skip(65536).steps(50, 16, 64.0).skip(32).steps(5, 16, 64.0);
  EXPECT_EQ(run.diagnosis().summary,
            "Nothing is wrong: 2 of 147 steps were skipped, the scale ended at 2^4.");
}

TEST(Diagnose, ShortRunIsNotCalledHealthy) {
  EXPECT_NE(Recorded("dynamic").steps(3, 1024).diagnosis().summary.find("too short"),
            std::string::npos);
}

TEST(Diagnose, ScaleTooLowNeedsRoomAndUnderflow) {
  const double far = std::ldexp(65504.0, -21);
  Recorded run("static:1024");
  run.steps(40, 1024, far).layers(0.999, far).steps(4000, 1024, far).layers(0.999, far);
  ASSERT_EQ(run.found(), "scale-too-low");
  const Finding finding = run.diagnosis().findings[0];
  EXPECT_EQ(finding.command, "--loss-scale headroom:init_scale=268435456");
  EXPECT_EQ(finding.problem,
            "At scale 2^10 99.90 % of the nonzero gradients are subnormal in FP16, and there is "
            "room for 21 doublings of the scale.");
  EXPECT_EQ(Recorded("static:1024").steps(80, 1024, far).layers(0.2, far).found(), "")
      << "no underflow";
  EXPECT_EQ(Recorded("static:1024").steps(80, 1024).layers(0.2).found(), "") << "no room";
  EXPECT_EQ(Recorded("static:1", "bf16").steps(80, 1, far).layers(0.999, far).found(), "");
  EXPECT_EQ(Recorded("none", "fp32").steps(80, 1, far).layers(0.999, far).found(), "");
  EXPECT_EQ(Recorded("none", "fp16").steps(80, 1, far).layers(0.999, far).found(), "scale-too-low");
  EXPECT_EQ(Recorded("none", "").steps(80, 1, far).layers(0.999, far).found(), "")
      << "unknown, no scaler";
  const Diagnosis unknown =
      Recorded("static:8", "").steps(80, 8, far).layers(0.999, far).diagnosis();
  EXPECT_EQ(unknown.findings.at(0).problem.substr(0, 29), "If this run trains in FP16 (i");
}

TEST(Diagnose, ShortRunHasToBeginWithAHigherScale) {
  // From 2^16 on the policy doubles the scale after 256, 512, 768 ... steps: it would need 91 *
  // 256.
  const double far = std::ldexp(65504.0, -16);
  const auto with = [&](const char* policy, int steps) {
    return Recorded(policy).steps(steps, 65536, far).layers(0.5, far).diagnosis();
  };
  EXPECT_EQ(with("dynamic", 200).findings.at(0).command,
            "--loss-scale headroom:init_scale=536870912");
  EXPECT_EQ(with("headroom", 91 * 256 - 1).findings.at(0).command,
            "--loss-scale headroom:init_scale=536870912");
  EXPECT_EQ(with("dynamic", 91 * 256).findings.at(0).command, "--loss-scale headroom");
  EXPECT_TRUE(with("headroom", 91 * 256).findings.empty());
}

// Overflow inside backward may leave only NaN, because inf x 0 is NaN.
TEST(Diagnose, RoomIsThatOfTheLastScale) {
  Recorded fell("dynamic");  // bad batches have lowered the scale
  for (int i = 0; i < 12; ++i) {
    fell.steps(30, std::ldexp(65536.0, -i), std::ldexp(4096.0, -i)).skip(65536, 1, 5, kNan);
  }
  fell.layers(0.5, 1.0).layers(0.5, 1.0);
  EXPECT_NE(fell.found().find("scale-too-low"), std::string::npos);
  Recorded rose("static:32768");  // the largest gradients of the recent steps do not fit any more
  rose.steps(100, 2048, 2048).steps(200, 2048, 32768).steps(10, 32768, 1024).layers(0.5, 1.0);
  EXPECT_EQ(rose.layers(0.5, 1.0).found(), "no-scale-left");
}

TEST(Diagnose, StepsAtTheFloorThatABatchCausedAreNoGrowthOfGradients) {
  Recorded run("headroom-retry");
  for (int i = 0; i < 12; ++i) run.steps(20, 65536, 1024).skip(0x1p-24);
  EXPECT_EQ(run.steps(20, 65536, 1024).found().find("at-floor"), std::string::npos);
}

TEST(Diagnose, AScaleThatHasFailedBoundsTheRoom) {
  const double far = std::ldexp(65504.0, -6);  // of the parameters
  const auto with = [&](int failures, double failed, double subnormal) {
    Recorded run("dynamic:growth_interval=200");
    for (int i = 0; i < 8; ++i) {
      run.steps(200, 65536, far).layers(subnormal, far);
      if (i >= 8 - failures) run.skip(failed);
    }
    return run.steps(100, 65536, far).layers(subnormal, far).found();
  };
  EXPECT_EQ(with(0, 0.0, 0.35), "scale-too-low");
  EXPECT_EQ(with(8, 131072, 0.35), "");
  EXPECT_EQ(with(8, 131072, 0.5), "no-scale-left");
  EXPECT_EQ(with(1, 131072, 0.5), "") << "may be an outlier";
  EXPECT_EQ(with(8, 65536, 0.35), "scale-too-low") << "later steps fitted";
  EXPECT_EQ(with(8, 0x1p20, 0.35), "scale-too-low") << "there is room below it";
}

TEST(Diagnose, GradientsThatHaveGrownToTheFloorAreClipped) {
  const auto with = [](int first) {
    Recorded run("dynamic");
    run.steps(100, std::ldexp(1.0, first));
    for (int exponent = first; exponent > 0; exponent -= 2) {
      run.skip(std::ldexp(1.0, exponent)).skip(std::ldexp(1.0, exponent - 1));
      run.steps(50, std::ldexp(1.0, exponent - 2));
    }
    return run.skip(1.0).diagnosis();
  };
  ASSERT_EQ(with(12).findings.at(0).rule, "at-floor");
  EXPECT_EQ(with(12).findings[0].command, "--clip 1");
  EXPECT_EQ(with(4).findings.at(0).command, "--loss-scale headroom");
}

TEST(Diagnose, RunThatSkipsManyStepsForNoKnownReasonIsNotCalledHealthy) {
  const auto summary = [](int between) {
    Recorded run("dynamic");
    for (int i = 0; i < 12; ++i) run.steps(between, 1024, 512).skip(1024);
    return run.diagnosis().summary;
  };
  EXPECT_EQ(summary(10),
            "No rule explains why 12 of 132 steps were skipped; look at their culprits in the "
            "report.");
  EXPECT_EQ(summary(40).substr(0, 17), "Nothing is wrong:");
}

TEST(Diagnose, RunWithoutAnAppliedStepIsNotCalledHealthy) {
  Recorded run("torch");
  for (int i = 0; i < 14; ++i) run.skip(std::ldexp(65536.0, -i));
  EXPECT_EQ(run.diagnosis().summary,
            "This run cannot be judged yet: none of its 14 steps was applied.");
}

TEST(Diagnose, FloorIsNamedWhereGradientsOverflowAtIt) {
  EXPECT_EQ(Recorded("dynamic:min_scale=1024").skip(2048).skip(1024).found(), "at-floor");
  EXPECT_EQ(Recorded("dynamic:min_scale=1024").skip(2048).steps(40, 1024).found(), "");
  Recorded run("static:65536");
  for (int i = 0; i < 20; ++i) run.steps(4, 65536).skip(65536);
  EXPECT_EQ(run.found(), "at-floor");
  EXPECT_EQ(Recorded("static:65536").steps(300, 65536).skip(65536).steps(9, 65536).found(), "");
  Recorded stuck("static:65536");  // far less than 2 % of the steps, but they are the last ones
  stuck.steps(1000, 65536);
  for (int i = 0; i < 5; ++i) stuck.skip(65536);
  EXPECT_EQ(stuck.found(), "at-floor");
  Recorded once("dynamic:min_scale=128");  // long ago, and now a growth fails far above
  EXPECT_EQ(once.skip(128).steps(7000, 16384).skip(32768).found(), "");
}

TEST(Diagnose, SkipsInARowCountAfterWarmUpOnly) {
  const auto with = [](int before, int skips, const char* policy) {
    Recorded run(policy);
    run.steps(before, 65536);
    for (int i = 0; i < skips; ++i) run.skip(std::ldexp(65536.0, -i));
    return run.steps(20, 64).found();
  };
  EXPECT_EQ(with(40, 5, "dynamic"), "skips-in-row");
  EXPECT_EQ(with(40, 4, "dynamic"), "");
  EXPECT_EQ(with(0, 9, "dynamic"), "") << "the search for the first scale";
  EXPECT_EQ(with(40, 8, "deepspeed"), "") << "a hysteresis of 2 skips twice as often";
}

TEST(Diagnose, ASearchAfterAResumeIsNotGrowingGradients) {
  const auto with = [](double before) {
    Recorded run("dynamic");
    run.steps(200, before);
    for (int i = 0; i < 6; ++i) run.skip(std::ldexp(65536.0, -i));
    return run.steps(200, 1024).diagnosis().findings.at(0);
  };
  EXPECT_EQ(with(32768).command, "--clip 1");
  const Finding anew = with(1024);
  EXPECT_EQ(anew.rule, "skips-in-row");
  EXPECT_EQ(anew.problem,
            "Steps 201 to 206 were skipped in a row, because the scale had jumped from 2^10 to "
            "2^16: the scaler had lost its state and searched for its scale again.");
  EXPECT_EQ(anew.code, "scaler.load_state_dict(checkpoint[\"scaler\"])");
}

TEST(Diagnose, StepsSkippedForTheirNormAreNoOverflow) {
  Recorded run("dynamic");
  run.steps(100, 1024);
  for (int i = 0; i < 8; ++i) run.skip(1024, 0, 0);
  EXPECT_EQ(run.steps(100, 1024).found(), "");
}

TEST(Diagnose, CeilingIsNamedWhereItHurts) {
  Recorded run("dynamic:init_scale=16,max_scale=16");
  run.steps(60, 16, 16).layers(0.9, 16);
  EXPECT_EQ(run.found(), "at-ceiling");
  Recorded fine("dynamic:init_scale=16,max_scale=16");
  EXPECT_EQ(fine.steps(60, 16, 16).layers(0.0, 16).found(), "");
  Recorded own("headroom");
  own.steps(60, 0x1p32, 16).layers(0.9, 16);
  EXPECT_EQ(own.found(), "at-ceiling");
  EXPECT_EQ(own.diagnosis().findings[0].command, "--loss-scale headroom:max_scale=2199023255552");
  Recorded high("headroom:max_scale=1267650600228229401496703205376");  // 2^100
  high.steps(60, 0x1p100, 16).layers(0.9, 16);
  EXPECT_EQ(high.diagnosis().findings.at(0).command,
            "--loss-scale headroom:max_scale=649037107316853453566312041152512");  // 2^109
  Recorded highest("headroom:max_scale=85070591730234615865843651857942052864");   // 2^126
  EXPECT_EQ(highest.steps(60, 0x1p126, 16).layers(0.9, 16).found(), "") << "there is no higher one";
}

TEST(Diagnose, TensorThatBoundsTheScaleIsNamed) {
  const auto with = [](double other) {
    Recorded run("dynamic");
    run.steps(40, 1024, 32768).layers(0.5, 32768, other).steps(40, 1024, 32768);
    return run.layers(0.5, 32768, other).diagnosis();
  };
  EXPECT_EQ(with(1024.0).findings.at(0).rule, "one-tensor");
  EXPECT_EQ(with(1024.0).findings.size(), 1u);
  EXPECT_EQ(with(1024.0).findings[0].code, "headroom.torch.keep_fp32(model, [\"block.top\"])");
  EXPECT_EQ(with(4096.0).findings.at(0).rule, "no-scale-left") << "only 8 times larger";
}

TEST(Diagnose, NamesOfTensorsDoNotBecomeCode) {
  const auto code = [](const std::string& name) {
    Recorded run("dynamic");
    run.steps(40, 1024, 32768).layers(0.5, 32768, 1024, name).steps(40, 1024, 32768);
    return run.layers(0.5, 32768, 1024, name).diagnosis().findings.at(0).code;
  };
  EXPECT_EQ(code("pos_embed"), "") << "no module has this name";
  EXPECT_EQ(code("a\"]); import os\n\\.weight"),
            "headroom.torch.keep_fp32(model, [\"a\\\"]); import os\\x0a\\\\\"])");
}

TEST(Diagnose, GradientsThatNeedMoreRangeGetAnotherFormat) {
  Recorded run("dynamic");
  EXPECT_EQ(run.steps(80, 1024, 32768).layers(0.5, 32768).found(), "no-scale-left");
  EXPECT_EQ(run.diagnosis().findings[0].command, "--precision bf16");
  EXPECT_EQ(Recorded("dynamic").steps(80, 1024, 32768).layers(0.35, 32768).found(), "");
}

TEST(Diagnose, FailedGrowthCountsIfItCostsSteps) {
  const auto with = [](int interval) {
    Recorded run("dynamic");
    run.steps(30, 1024);
    for (int i = 0; i < 8; ++i) run.skip(2048).steps(interval, 1024);
    return run.found();
  };
  EXPECT_EQ(with(10), "growth-fails");
  Recorded every_second("dynamic");
  every_second.steps(30, 1024);
  for (int i = 0; i < 8; ++i) every_second.steps(4, 1024).steps(4, 2048).skip(4096);
  EXPECT_EQ(every_second.found(), "growth-fails");
  EXPECT_EQ(with(200), "") << "one step in 200 is the price of every dynamic scale";
}

TEST(Diagnose, WideFormatsNeedNoScaler) {
  EXPECT_EQ(Recorded("dynamic", "bf16").steps(60, 65536).found(), "no-scaler-needed");
  EXPECT_EQ(Recorded("dynamic", "fp32").steps(60, 65536).found(), "no-scaler-needed");
  EXPECT_EQ(Recorded("none", "bf16").steps(60, 1).found(), "");
  EXPECT_EQ(Recorded("dynamic", "").steps(60, 65536).found(), "");
}

TEST(Diagnose, OnlyStepsInThePresentPrecisionNeedNoScaler) {
  const auto found = [](int steps_before, float later) {
    const Folder folder;
    RunInfo info;
    info.settings = {{"precision", "fp16"}};
    Recorder recorder(folder.path("run"), info);
    for (int step = 1; step <= 30; ++step) recorder.step(step, 1.0, applied(65536.0f));
    recorder.settings({{"precision", "bf16"}});
    recorder.rewind(steps_before);
    for (int i = 1; i <= 30; ++i) recorder.step(steps_before + i, 1.0, applied(later));
    return diagnose(folder.path("run")).at(0).findings.size();
  };
  EXPECT_EQ(found(0, 1.0f), 0u) << "begun again";
  EXPECT_EQ(found(30, 1.0f), 0u);
  EXPECT_EQ(found(30, 2.0f), 1u);
}

TEST(Diagnose, WordsOfFrameworksNameThePrecision) {
  for (const char* precision : {"bf16-mixed", "bfloat16", "BF16", "fp32", "64-true"}) {
    EXPECT_EQ(Recorded("dynamic", precision).steps(60, 65536).found(), "no-scaler-needed")
        << precision;
  }
  EXPECT_EQ(Recorded("dynamic", "16-mixed").steps(60, 65536).found(), "");
}

TEST(Diagnose, NamesFromAHistoryAreMadePrintable) {
  Diagnosis diagnosis;
  diagnosis.findings = {{"x", "The tensor \x1b[2J is bad.", "Change\nit.", "", "a\x07"}};
  EXPECT_EQ(diagnosis.to_string(), "1. The tensor ?[2J is bad. [x]\n   Change?it.\n     a?\n");
}

}  // namespace
}  // namespace headroom
