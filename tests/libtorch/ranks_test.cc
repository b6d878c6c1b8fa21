// libtorch::GradScaler with ranks.
#include <headroom/libtorch.h>
#include <headroom/libtorch/ranks.h>
#include <torch/torch.h>

#include "tests/agree/threads.h"
#include "tests/libtorch/support.h"

namespace headroom::libtorch {
namespace {

TEST(Ranks, OverflowOnOneRankSkipsTheStepOnAllRanks) {
  for (const bool fused : {false, true}) {
    run_on_ranks(2, [&](std::shared_ptr<headroom::Ranks> ranks) {
      torch::Tensor w = torch::ones({4}).requires_grad_(true);
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (fused) {
        optimizer = std::make_unique<FusedAdamW>(std::vector<torch::Tensor>{w},
                                                 torch::optim::AdamWOptions(0.1));
      } else {
        optimizer = std::make_unique<torch::optim::SGD>(std::vector<torch::Tensor>{w}, 0.1);
      }
      GradScaler scaler(GradScalerOptions().init_scale(1024).ranks(ranks));
      for (const bool bad : {true, false}) {
        optimizer->zero_grad();
        scaler.scale(w.sum()).backward();
        if (bad && ranks->rank() == 1) w.mutable_grad()[2] = INFINITY;
        const StepReport report = scaler.step(*optimizer);
        scaler.update();
        EXPECT_EQ(report.applied, !bad);
        EXPECT_EQ(report.stats.culprit_rank, bad ? 1 : -1);
        EXPECT_EQ(scaler.get_scale(), 512.0);
        EXPECT_EQ(torch::equal(w, torch::ones({4})), bad);
      }
    });
  }
}

TEST(Ranks, OptimizerWithoutGradientsParticipates) {
  for (const bool enabled : {true, false}) {
    const int64_t reductions = run_on_ranks(2, [&](std::shared_ptr<headroom::Ranks> ranks) {
      torch::Tensor w = torch::ones({4}).requires_grad_(true);
      torch::optim::SGD optimizer(std::vector<torch::Tensor>{w}, 0.1);
      GradScaler scaler(GradScalerOptions().enabled(enabled).ranks(ranks, RankGradients::kSharded));
      const torch::Tensor loss = scaler.scale(w.sum());
      if (ranks->rank() == 0) loss.backward();
      EXPECT_TRUE(scaler.step(optimizer).applied);
    });
    EXPECT_EQ(reductions, 1);
  }
}

TEST(Ranks, GroupWithoutATimeLimitIsRejected) {
  expect_error(ErrorCode::kInvalidArgument, "time limit above 0",
               [] { ProcessGroupRanks ranks({}, std::chrono::milliseconds(0), torch::kCPU); });
}

// Any failure of the process group is a lost rank, and later calls fail too.
TEST(Ranks, GroupFailureIsReportedAsALostRank) {
  ProcessGroupRanks::Group group;
  group.size = 2;
  group.all_gather = [](auto&, auto&) -> ProcessGroupRanks::Work {
    throw std::runtime_error("Connection closed by peer\nat line 7");
  };
  ProcessGroupRanks ranks(group, std::chrono::seconds(1), torch::kCPU);
  double number = 0.0;
  expect_error(ErrorCode::kRankLost, "(Connection closed by peer); it has ended",
               [&] { ranks.reduce(&number, 1, &number, 1); });
  expect_error(ErrorCode::kRankLost, "was lost before",
               [&] { ranks.reduce(&number, 1, &number, 1); });
}

}  // namespace
}  // namespace headroom::libtorch
