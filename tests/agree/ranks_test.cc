// GradScaler with ranks: the verdict, the norm and the next scale are the same on all of them.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <mutex>

#include "scaler/scaler.h"
#include "tests/agree/threads.h"
#include "tests/support.h"

namespace headroom {
namespace {

constexpr RankGradients kBothKinds[] = {RankGradients::kReplicated, RankGradients::kSharded};

// The tensors of one rank: four elements each, with weights of 1.
struct RankModel {
  std::vector<std::vector<float>> weights, grads;
  std::vector<Parameter> parameters;
  explicit RankModel(size_t tensors, const std::string& prefix = "w")
      : weights(tensors, std::vector<float>(4, 1.0f)), grads(tensors, std::vector<float>(4)) {
    for (size_t i = 0; i < tensors; ++i) {
      parameters.push_back({prefix + std::to_string(i), view(weights[i]), view(grads[i])});
    }
  }
  void fill(float value) {
    for (auto& grad : grads) std::fill(grad.begin(), grad.end(), value);
  }
};

// One result per rank.
template <typename T>
struct PerRank {
  explicit PerRank(int size) : values(static_cast<size_t>(size)) {}
  T& of(const Ranks& ranks) { return values[static_cast<size_t>(ranks.rank())]; }
  std::vector<T> values;
};

TEST(Agree, OneBadRankSkipsTheStepOnAllRanks) {
  for (const RankGradients kind : kBothKinds) {
    for (const int size : {2, 3, 8}) {
      PerRank<StepReport> reports(size);
      PerRank<float> scales(size), weights(size);
      const int64_t reductions = run_on_ranks(size, [&](std::shared_ptr<Ranks> ranks) {
        RankModel mine(3);
        AdamW optimizer(mine.parameters);
        GradScaler scaler(DynamicScale{.init_scale = 1024.0f}, {.ranks = ranks, .gradients = kind});
        scaler.scale(1.0f);
        mine.fill(1024.0f);
        if (ranks->rank() == size - 1) mine.grads[1][2] = kNan;
        if (ranks->rank() == size - 1) mine.grads[1][3] = kInf;
        reports.of(*ranks) = scaler.step(optimizer);
        scaler.update();
        scales.of(*ranks) = scaler.get_scale();
        weights.of(*ranks) = mine.weights[0][0];
      });
      EXPECT_EQ(reductions, 1);
      for (const StepReport& report : reports.values) {
        EXPECT_FALSE(report.applied);
        EXPECT_EQ(report.skip, Skip::kNotFinite);
        EXPECT_EQ(report.culprit, "rank " + std::to_string(size - 1) + ": w1: 1 inf, 1 nan");
        EXPECT_EQ(report.stats.culprit_rank, size - 1);
        EXPECT_EQ(report.stats.inf_count, 1);
        EXPECT_EQ(report.stats.nan_count, 1);
      }
      EXPECT_EQ(scales.values, std::vector<float>(static_cast<size_t>(size), 512.0f));
      EXPECT_EQ(weights.values, std::vector<float>(static_cast<size_t>(size), 1.0f));
    }
  }
}

TEST(Agree, NormOfShardsEqualsTheGlobalNorm) {
  constexpr int kSize = 4;
  PerRank<StepReport> reports(kSize);
  run_on_ranks(kSize, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(2);
    SGD optimizer(mine.parameters);
    GradScaler scaler(StaticScale{8.0f}, {.ranks = ranks, .gradients = RankGradients::kSharded});
    scaler.scale(1.0f);
    mine.fill(8.0f * static_cast<float>(ranks->rank()));  // 1, 2, 3 unscaled, 8 elements each
    reports.of(*ranks) = scaler.step(optimizer, {.max_norm = 1.0f});
  });
  for (const StepReport& report : reports.values) {
    EXPECT_TRUE(report.applied);
    EXPECT_DOUBLE_EQ(report.grad_norm, std::sqrt(8.0 * (1.0 + 4.0 + 9.0)));
    EXPECT_EQ(report.clip_factor, reports.values[0].clip_factor);
    EXPECT_LT(report.clip_factor, 1.0);
    EXPECT_EQ(report.stats.count, 32);
    EXPECT_EQ(report.stats.amax, 24.0);
  }
}

TEST(Agree, CulpritOfUnevenShardsIsNamedOnEveryRank) {
  PerRank<StepReport> reports(2);
  run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
    const auto size = static_cast<size_t>(2 - ranks->rank());
    std::vector<float> weight(size, 1.0f), grad(size, ranks->rank() == 1 ? kInf : 1.0f);
    SGD optimizer({{"w", view(weight), view(grad)}});
    GradScaler scaler(StaticScale{}, {.ranks = ranks, .gradients = RankGradients::kSharded});
    scaler.scale(1.0f);
    reports.of(*ranks) = scaler.step(optimizer);
  });
  for (const StepReport& report : reports.values) {
    EXPECT_EQ(report.culprit, "rank 1: w: 1 inf, 0 nan");
  }
}

TEST(Agree, CulpritIsNamedOnItsRankAndNumberedOnOthers) {
  PerRank<StepReport> reports(3);
  run_on_ranks(3, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(2, "part" + std::to_string(ranks->rank()) + ".");
    SGD optimizer(mine.parameters);
    GradScaler scaler(StaticScale{}, {.ranks = ranks, .gradients = RankGradients::kSharded});
    scaler.scale(1.0f);
    if (ranks->rank() == 1) mine.grads[1][0] = kInf;
    reports.of(*ranks) = scaler.step(optimizer);
  });
  EXPECT_EQ(reports.values[0].culprit, "rank 1: its gradient 1: 1 inf, 0 nan");
  EXPECT_EQ(reports.values[1].culprit, "rank 1: part1.1: 1 inf, 0 nan");
  EXPECT_EQ(reports.values[2].to_string(),
            "skipped at scale 1024: rank 1: its gradient 1: 1 inf, 0 nan");
}

TEST(Agree, RankWithoutGradientsParticipates) {
  PerRank<std::vector<StepReport>> reports(2);
  PerRank<float> scales(2);
  run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(ranks->rank() == 0 ? 0 : 1);
    AdamW optimizer(mine.parameters);
    GradScaler scaler(DynamicScale{}, {.ranks = ranks, .gradients = RankGradients::kSharded});
    for (const float value : {3.0f * 65536.0f, kInf}) {
      scaler.scale(ranks->rank() == 0 ? 0.0f : 1.0f);
      mine.fill(value);
      reports.of(*ranks).push_back(scaler.step(optimizer));
      scaler.update();
    }
    scales.of(*ranks) = scaler.get_scale();
  });
  for (const auto& pair : reports.values) {
    EXPECT_TRUE(pair[0].applied);
    EXPECT_EQ(pair[0].grad_norm, 6.0);
    EXPECT_FALSE(pair[1].applied);
    EXPECT_EQ(pair[1].stats.culprit_rank, 1);
  }
  EXPECT_EQ(scales.values[0], 32768.0f);
  EXPECT_EQ(scales.values[1], 32768.0f);
}

TEST(Agree, StepWithoutGradientsOnAnyRankIsRejected) {
  for (const RankGradients kind : kBothKinds) {
    run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
      std::vector<float> weight = {1.0f};
      SGD optimizer({{"w", view(weight), TensorView{}}});
      GradScaler scaler(DynamicScale{}, {.ranks = ranks, .gradients = kind});
      scaler.scale(1.0f);
      expect_error(ErrorCode::kWrongOrder, "on any rank", [&] { scaler.step(optimizer); });
      EXPECT_EQ(scaler.state().steps(), 0);
    });
  }
}

TEST(Agree, DifferentReplicatedParametersAreRejected) {
  struct Difference {
    std::vector<std::string> names;
    size_t elements;
  };
  for (const Difference& other :
       {Difference{{"a", "c"}, 1}, Difference{{"b", "a"}, 1}, Difference{{"a", "b"}, 4}}) {
    run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
      const Difference mine = ranks->rank() == 0 ? Difference{{"a", "b"}, 1} : other;
      std::vector<float> w(mine.elements, 1.0f), v = w, gw(mine.elements), gv(mine.elements);
      gw[0] = gv[0] = 1.0f;  // the same norm
      SGD optimizer({{mine.names[0], view(w), view(gw)}, {mine.names[1], view(v), view(gv)}});
      GradScaler scaler(NoScale{}, {.ranks = ranks});
      scaler.scale(1.0f);
      expect_error(ErrorCode::kRanksDiffer, "names, sizes or order",
                   [&] { scaler.step(optimizer); });
      EXPECT_EQ(w[0], 1.0f);
    });
  }
}

TEST(Agree, SeveralScalersCanShareRanks) {
  PerRank<std::vector<float>> scales(3);
  const int64_t reductions = run_on_ranks(3, [&](std::shared_ptr<Ranks> ranks) {
    RankModel first(1, "first"), second(1, "second");
    SGD generator(first.parameters), critic(second.parameters);
    GradScaler one(DynamicScale{}, {.ranks = ranks}), other(DynamicScale{}, {.ranks = ranks});
    for (int step = 0; step < 3; ++step) {
      first.fill(one.scale(1.0f));
      second.fill(other.scale(1.0f));
      if (step == 1 && ranks->rank() == 2) second.grads[0][0] = kInf;
      one.step(generator);
      other.step(critic);
      one.update();
      other.update();
    }
    scales.of(*ranks) = {one.get_scale(), other.get_scale()};
  });
  EXPECT_EQ(reductions, 6);
  for (const auto& pair : scales.values) EXPECT_EQ(pair, (std::vector<float>{65536.0f, 32768.0f}));
}

TEST(Agree, UnscaleAgreesAcrossRanks) {
  for (const RankGradients kind : kBothKinds) {
    PerRank<GradStats> results(2);
    PerRank<StepReport> reports(2);
    const int64_t reductions = run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
      RankModel mine(1);
      SGD optimizer(mine.parameters);
      GradScaler scaler(DynamicScale{}, {.ranks = ranks, .gradients = kind});
      scaler.scale(1.0f);
      mine.fill(65536.0f);
      if (ranks->rank() == 1) mine.grads[0][0] = kInf;
      results.of(*ranks) = scaler.unscale_(optimizer);
      mine.fill(0.5f);  // as manual clipping might, hiding the overflow
      reports.of(*ranks) = scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32768.0f);
    });
    EXPECT_EQ(reductions, 2);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_FALSE(results.values[static_cast<size_t>(rank)].ok());
      const StepReport& report = reports.values[static_cast<size_t>(rank)];
      EXPECT_FALSE(report.applied);
      EXPECT_EQ(report.culprit, "rank 1: w0: 1 inf, 0 nan");
      EXPECT_EQ(report.stats.culprit_rank, 1);
    }
  }
}

TEST(Agree, UnscaleOverflowOnOneRankSkipsTheStepOnAllRanks) {
  PerRank<StepReport> reports(2);
  run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(1);
    SGD optimizer(mine.parameters);
    GradScaler scaler(StaticScale{0x1p-10f},
                      {.ranks = ranks, .gradients = RankGradients::kSharded});
    scaler.scale(1.0f);
    mine.fill(ranks->rank() == 0 ? 1.0f : 1e38f);
    reports.of(*ranks) = scaler.step(optimizer);
    EXPECT_EQ(mine.weights[0][0], 1.0f);
  });
  for (const StepReport& report : reports.values) {
    EXPECT_EQ(report.skip, Skip::kUnscaleOverflow);
    EXPECT_NE(report.culprit.find("is beyond FP32"), std::string::npos) << report.culprit;
  }
}

TEST(Agree, HeadroomRuleUsesTheLargestGradientOfAllRanks) {
  PerRank<std::vector<float>> scales(3);
  run_on_ranks(3, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(1);
    SGD optimizer(mine.parameters);
    GradScaler scaler(HeadroomScale{}, {.ranks = ranks, .gradients = RankGradients::kSharded});
    for (int step = 0; step < 600; ++step) {
      const float scale = scaler.scale(1.0f);
      mine.fill(scale * (ranks->rank() == step % 3 ? 0.5f : 1e-6f));
      scaler.step(optimizer);
      scaler.update();
      scales.of(*ranks).push_back(scaler.get_scale());
    }
  });
  EXPECT_EQ(scales.values[0], scales.values[1]);
  EXPECT_EQ(scales.values[0], scales.values[2]);
  EXPECT_LE(scales.values[0].back() * 0.5f, 65504.0f);
}

TEST(Agree, OverflowErrorsAndAlarmsOccurOnAllRanks) {
  std::atomic<int> overflows = 0, alarms = 0, culprits = 0;
  run_on_ranks(3, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(1);
    SGD optimizer(mine.parameters);
    GradScaler scaler(StaticScale{.on_overflow = OnOverflow::kThrow, .max_skips_in_row = 2},
                      {.ranks = ranks, .on_alarm = [&](const AlarmReport& report) {
                         ++alarms;
                         culprits += report.culprit == "rank 2: w0: 4 inf, 0 nan";
                       }});
    for (int step = 0; step < 2; ++step) {
      scaler.scale(1.0f);
      mine.fill(ranks->rank() == 2 ? kInf : 1.0f);
      try {
        scaler.step(optimizer);
      } catch (const Error& error) {
        overflows += error.code() == ErrorCode::kOverflow;
      }
      scaler.update();
    }
  });
  EXPECT_EQ(overflows, 6);
  EXPECT_EQ(alarms, 3);
  EXPECT_EQ(culprits, 3);
}

TEST(Agree, DisabledScalerAgreesAcrossRanks) {
  run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(1);
    SGD optimizer(mine.parameters);
    GradScaler scaler(DynamicScale{}, {.enabled = false, .ranks = ranks});
    mine.fill(ranks->rank() == 0 ? kNan : 1.0f);
    EXPECT_FALSE(scaler.step(optimizer).applied);
    mine.fill(1.0f);
    EXPECT_TRUE(scaler.step(optimizer).applied);
  });
}

// Applies `change` on rank 1, steps both ranks and expects the error on both, with weights
// unchanged.
void expect_difference(const std::string& part,
                       const std::function<void(GradScaler&, RankModel&)>& change,
                       const StepOptions& changed_options = {}) {
  std::atomic<int> errors = 0;
  run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(1);
    AdamW optimizer(mine.parameters);
    GradScaler scaler(DynamicScale{}, {.ranks = ranks});
    for (int step = 0; step < 3; ++step) {
      scaler.scale(1.0f);
      mine.fill(65536.0f);
      scaler.step(optimizer);
      scaler.update();
    }
    const std::vector<float> before = mine.weights[0];
    if (ranks->rank() == 1) change(scaler, mine);
    scaler.scale(1.0f);
    expect_error(ErrorCode::kRanksDiffer, part, [&] {
      scaler.step(optimizer, ranks->rank() == 1 ? changed_options : StepOptions{});
    });
    EXPECT_EQ(mine.weights[0], before);
    ++errors;
  });
  EXPECT_EQ(errors, 2);
}

TEST(Agree, DivergedRanksAreDetectedBeforeWeightsChange) {
  expect_difference("different scales, 16384 and 65536",
                    [](GradScaler& scaler, RankModel&) { scaler.set_scale(16384.0f); });
  expect_difference("after updates 3 and 9", [](GradScaler& scaler, RankModel&) {
    internal::ScaleRecord record = internal::ScaleStateAccess::record(scaler.state());
    record.numbers.steps = 9;
    scaler.load_state(internal::ScaleStateAccess::make(record));
  });
  expect_difference("the same scale but different states", [](GradScaler& scaler, RankModel&) {
    internal::ScaleRecord record = internal::ScaleStateAccess::record(scaler.state());
    record.numbers.dynamic.growth_tracker = 1;
    scaler.load_state(internal::ScaleStateAccess::make(record));
  });
  expect_difference("differ in policy", [](GradScaler& scaler, RankModel&) {
    ScalePolicy policy = scaler.policy();
    policy.set("growth_interval", 100);
    scaler.set_policy(policy);
  });
  expect_difference("differ in policy, max_norm", [](GradScaler&, RankModel&) {},
                    {.max_norm = 1.0f});
  expect_difference(
      "diverged: their gradients should be the same, but have norms of 2 and "
      "131072 before",
      [](GradScaler&, RankModel& rank) { rank.fill(1.0f); });
}

TEST(Agree, MismatchedCallsAreDetected) {
  run_on_ranks(2, [&](std::shared_ptr<Ranks> ranks) {
    RankModel mine(2);
    SGD first({mine.parameters[0]}), second({mine.parameters[1]});
    GradScaler scaler(DynamicScale{}, {.ranks = ranks});
    scaler.scale(1.0f);
    expect_error(ErrorCode::kRanksDiffer,
                 "one is in step() of its optimizer 0, another in unscale_() of its optimizer 0",
                 [&] {
                   if (ranks->rank() == 0) scaler.step(first);
                   if (ranks->rank() == 1) scaler.unscale_(first);
                 });
    expect_error(ErrorCode::kRanksDiffer, "optimizer 0, another in step() of its optimizer 1",
                 [&] { scaler.step(ranks->rank() == 0 ? first : second); });
  });
}

TEST(Agree, ExtraStepOnOneRankTimesOut) {
  std::atomic<int> lost = 0;
  run_on_ranks(
      2,
      [&](std::shared_ptr<Ranks> ranks) {
        RankModel mine(1);
        SGD optimizer(mine.parameters);
        GradScaler scaler(DynamicScale{}, {.ranks = ranks});
        for (int step = 0; step < 4 + ranks->rank(); ++step) {
          scaler.scale(1.0f);
          if (step == 4) {
            expect_error(ErrorCode::kRankLost, "", [&] { scaler.step(optimizer); });
            ++lost;
            return;
          }
          scaler.step(optimizer);
          scaler.update();
        }
      },
      std::chrono::seconds(3));  // long enough for the other rank on a busy machine
  EXPECT_EQ(lost, 1);
}

TEST(Agree, InvalidRanksAreRejected) {
  struct InvalidRanks : Ranks {
    int rank() const override { return 2; }
    int size() const override { return 2; }
    void reduce(double*, size_t, double*, size_t) override {}
  };
  expect_error(ErrorCode::kInvalidArgument, "rank 2 of 2", [] {
    GradScaler scaler(DynamicScale{}, {.ranks = std::make_shared<InvalidRanks>()});
  });
  struct HostRanks : InvalidRanks {
    int rank() const override { return 0; }
  };
  expect_error(ErrorCode::kUnsupported, "needs ranks that agree there", [] {
    GradScaler scaler(DynamicScale{},
                      {.device = {DeviceType::kCUDA, 0}, .ranks = std::make_shared<HostRanks>()});
  });
  expect_error(ErrorCode::kUnsupported, "communicate on the host",
               [] { HostRanks().enqueue(nullptr, 0, nullptr, 0, nullptr); });

  // An external found_inf is known on this rank only, so the other ranks would not skip.
  std::vector<float> weight(2, 1.0f), grad(2, 1.0f);
  SGD optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler(DynamicScale{}, {.enabled = false, .ranks = std::make_shared<HostRanks>()});
  const float found = 1.0f;
  expect_error(ErrorCode::kInvalidArgument, "without ranks",
               [&] { internal::ScalerAccess::step(scaler, optimizer, {}, {.found_inf = &found}); });
}

// For any assignment of tensors to ranks, the verdict and the norm equal those of one process.
RC_GTEST_PROP(Agree, VerdictDoesNotDependOnTheSharding, ()) {
  const int size = *rc::gen::inRange(2, 9);
  const auto tensors = *rc::gen::inRange<size_t>(1, 12);
  std::vector<std::vector<double>> grads(tensors);
  std::vector<int> owner(tensors);
  const bool bad = *rc::gen::weightedElement<bool>({{3, false}, {1, true}});
  for (size_t i = 0; i < tensors; ++i) {
    owner[i] = *rc::gen::inRange(0, size);
    const double unit = *rc::gen::element(1e-250, 1e-10, 1.0, 1e10, 1e30);
    grads[i] =
        random_values<double>(*rc::gen::inRange<size_t>(1, 100), static_cast<uint32_t>(i), unit);
  }
  if (bad) grads[tensors - 1][0] = *rc::gen::element(HUGE_VAL, std::nan(""));
  const float scale = *rc::gen::element(0.25f, 1.0f, 1024.0f);
  std::vector<std::vector<float>> weights(tensors);
  const auto step = [&](const std::vector<size_t>& list, std::shared_ptr<Ranks> ranks) {
    struct NoOpOptimizer : Optimizer {
      explicit NoOpOptimizer(std::vector<Parameter> parameters)
          : Optimizer(std::move(parameters)) {}
      void apply(float, bool) override {}
    };
    std::vector<Parameter> parameters;
    for (const size_t i : list) parameters.push_back({"", {}, view(grads[i])});
    NoOpOptimizer optimizer(parameters);
    GradScaler scaler(StaticScale{scale}, {.ranks = ranks, .gradients = RankGradients::kSharded});
    scaler.scale(1.0f);
    return scaler.step(optimizer, {.max_norm = 1.0f, .clear_grads = ClearGrads::kNever});
  };
  std::vector<size_t> all(tensors);
  for (size_t i = 0; i < tensors; ++i) all[i] = i;
  const StepReport whole = step(all, nullptr);
  PerRank<StepReport> reports(size);
  run_on_ranks(size, [&](std::shared_ptr<Ranks> ranks) {
    std::vector<size_t> list;
    for (const size_t i : all) {
      if (owner[i] == ranks->rank()) list.push_back(i);
    }
    reports.of(*ranks) = step(list, ranks);
  });
  for (const StepReport& report : reports.values) {
    RC_ASSERT(report.applied == whole.applied);
    RC_ASSERT(report.skip == whole.skip);
    RC_ASSERT(report.stats.count == whole.stats.count);
    RC_ASSERT(report.stats.amax == whole.stats.amax);
    RC_ASSERT(std::isfinite(whole.grad_norm) == std::isfinite(report.grad_norm));
    if (std::isfinite(whole.grad_norm)) {
      RC_ASSERT(std::fabs(report.grad_norm - whole.grad_norm) <= 1e-12 * whole.grad_norm);
      RC_ASSERT(report.clip_factor == reports.values[0].clip_factor);
    }
    if (bad) RC_ASSERT(report.stats.culprit_rank == owner[tensors - 1]);
  }
}

}  // namespace
}  // namespace headroom
