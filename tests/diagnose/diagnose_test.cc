// The rules on histories made for them: where each must speak, and where it must not. Recorded runs
// of the trainer are in tests/cli/diagnose_test.py.
#include <gtest/gtest.h>
#include <headroom/diagnose.h>
#include <headroom/record.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "tests/record/folder.h"

namespace headroom {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Writes a history step by step.
class Recorded {
 public:
  explicit Recorded(const std::string& policy, const std::string& precision = "fp16",
                    bool resume = false, const Folder* folder = nullptr)
      : own_(folder == nullptr ? std::make_unique<Folder>() : nullptr),
        folder_(folder == nullptr ? *own_ : *folder) {
    RunInfo info;
    info.policy = parse_policy(policy);
    if (!precision.empty()) info.settings = {{"precision", precision}};
    info.resume = resume;
    recorder_.emplace(folder_.path("run"), info);
  }

  /// Steps whose largest scaled gradient is `largest`.
  Recorded& steps(int count, double scale, double largest = 16384.0, double loss = 1.0) {
    for (int i = 0; i < count; ++i) {
      StepReport report;
      report.applied = true;
      report.scale = static_cast<float>(scale);
      report.grad_norm = largest / scale;
      report.stats.amax = largest;
      report.stats.squares[1] = largest * largest;
      recorder_->step(++step_, loss, report);
    }
    return *this;
  }
  Recorded& skip(double scale, int64_t infs = 1, int64_t nans = 0, double loss = 1.0) {
    StepReport report;
    report.scale = static_cast<float>(scale);
    report.skip = Skip::kNotFinite;
    report.stats.inf_count = infs;
    report.stats.nan_count = nans;
    report.culprit = "w: bad";
    recorder_->step(++step_, loss, report);
    return *this;
  }
  /// A record of layers, of which a share is subnormal and the rest `largest`.
  Recorded& layers(double subnormal, double largest = 16384.0, double other = 0.0,
                   const std::string& name = "block.top.weight") {
    LayerStats layer;
    layer.name = name;
    layer.stats.count = 1000;
    layer.stats.amax = largest;
    fill(subnormal, largest, &layer);
    std::vector<LayerStats> all = {layer};
    if (other > 0.0) {
      all.push_back(layer);
      all[1].name = "block.other.weight";
      all[1].stats.amax = other;
      fill(subnormal, other, &all[1]);
    }
    layers_step_ = std::max(layers_step_ + 1, step_);
    recorder_->layers(layers_step_, 1.0, all);
    return *this;
  }
  Recorded& rewind(int64_t step) {
    recorder_->rewind(step);
    step_ = step;
    return *this;
  }
  Diagnosis diagnosis() const { return diagnose(folder_.path("run")).at(0); }
  /// The ids of the findings, the most important first.
  std::string found() const {
    std::string ids;
    for (const Finding& finding : diagnosis().findings)
      ids += (ids.empty() ? "" : " ") + finding.rule;
    return ids;
  }

 private:
  static void fill(double subnormal, double largest, LayerStats* layer) {
    layer->detail.histogram = {};
    const auto bin = [&](int exponent) -> int64_t& {
      return layer->detail.histogram[static_cast<size_t>(exponent - GradDetail::kMinExponent)];
    };
    const auto small = static_cast<int64_t>(std::lround(1000.0 * subnormal));
    bin(-20) += small;
    bin(std::ilogb(largest)) += 1000 - small;
  }

  std::unique_ptr<Folder> own_;
  const Folder& folder_;
  std::optional<Recorder> recorder_;
  int64_t step_ = 0;
  int64_t layers_step_ = 0;
};

TEST(Diagnose, HealthyRunGetsNoAdvice) {
  Recorded run("dynamic");
  run.skip(65536).skip(32768).steps(50, 16384).layers(0.1).steps(50, 16384).layers(0.2);
  EXPECT_EQ(run.found(), "");
  EXPECT_EQ(
      run.diagnosis().summary,
      "Nothing is wrong: 2 of 102 steps were skipped, the scale ended at 2^14 with room for 1 "
      "doubling.");
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
  EXPECT_EQ(finding.command, "--loss-scale headroom");
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
  // Above 2^16 the policy doubles the scale in 256 steps: it would need 13 * 256.
  const double far = std::ldexp(65504.0, -16);
  const auto with = [&](const char* policy, int steps) {
    return Recorded(policy).steps(steps, 65536, far).layers(0.5, far).diagnosis();
  };
  EXPECT_EQ(with("dynamic", 200).findings.at(0).command,
            "--loss-scale headroom:init_scale=536870912");
  EXPECT_EQ(with("headroom", 200).findings.at(0).command,
            "--loss-scale headroom:init_scale=536870912");
  EXPECT_EQ(with("dynamic", 4000).findings.at(0).command, "--loss-scale headroom");
  EXPECT_TRUE(with("headroom", 4000).findings.empty());
}

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

// Overflow inside backward may leave only NaN, because inf x 0 is NaN.
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

TEST(Diagnose, BadBatchesAreFoundWhileTheScaleClimbsBack) {
  Recorded run("dynamic:growth_interval=5");
  run.steps(40, 65536, 1024);
  for (int i = 0; i < 8; ++i) {
    run.skip(65536, 0, 5).steps(5, 32768, 512).skip(65536, 0, 5).steps(5, 32768, 512);
    run.steps(20, 65536, 1024);
  }
  EXPECT_EQ(run.found(), "bad-batches");
}

TEST(Diagnose, StepsAtTheFloorThatABatchCausedAreNoGrowthOfGradients) {
  Recorded run("headroom-retry");
  for (int i = 0; i < 12; ++i) run.steps(20, 65536, 1024).skip(0x1p-24);
  EXPECT_EQ(run.steps(20, 65536, 1024).found().find("at-floor"), std::string::npos);
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
