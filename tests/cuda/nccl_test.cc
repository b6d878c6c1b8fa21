// A device scaler over NCCL. The communicator has one rank, because NCCL does not allow two ranks
// on one device.
#include <headroom/nccl.h>

#include "tests/cuda/ranks.h"

namespace headroom {
namespace {

class Communicator {
 public:
  Communicator() { EXPECT_EQ(ncclCommInitAll(&communicator_, 1, nullptr), ncclSuccess); }
  ~Communicator() { ncclCommDestroy(communicator_); }
  std::shared_ptr<Ranks> ranks() const { return std::make_shared<nccl::NcclRanks>(communicator_); }

 private:
  ncclComm_t communicator_ = nullptr;
};

TEST_F(Cuda, NcclReducesHostValues) {
  const Communicator communicator;
  const auto ranks = communicator.ranks();
  EXPECT_EQ(ranks->rank(), 0);
  EXPECT_EQ(ranks->size(), 1);
  double sums[2] = {1.0, 2.0};
  double maxima[3] = {-3.0, 4.0, 5.0};
  ranks->reduce(sums, 2, maxima, 3);
  EXPECT_EQ(sums[1], 2.0);
  EXPECT_EQ(maxima[0], -3.0);
  std::vector<double> many(2000);
  expect_error(ErrorCode::kInvalidArgument, "1024 numbers at most",
               [&] { ranks->reduce(many.data(), many.size(), nullptr, 0); });
}

TEST_F(Cuda, NcclTrainingMatchesASingleProcess) {
  const Communicator communicator;
  for (const RankGradients kind : {RankGradients::kReplicated, RankGradients::kSharded}) {
    DeviceModel single(nullptr), with_nccl(communicator.ranks(), kind);
    for (unsigned i = 0; i < 12; ++i) {
      for (DeviceModel* model : {&single, &with_nccl}) {
        model->write_gradients(i, i % 5 == 3 ? std::nan("") : 0.0);
        model->step({.max_norm = 1.0f, .clear_grads = ClearGrads::kNever});
        EXPECT_EQ(model->scaler.report().applied, i % 5 != 3);
      }
    }
    EXPECT_EQ(single.weights(), with_nccl.weights());
    EXPECT_EQ(single.scaler.save(), with_nccl.scaler.save());
    EXPECT_EQ(with_nccl.scaler.report().grad_norm, single.scaler.report().grad_norm);
  }
}

TEST_F(Cuda, NcclStepCanBeCapturedInAGraph) {
  const Communicator communicator;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    const StreamScope scope(stream);
    DeviceModel eager(communicator.ranks()), captured(communicator.ranks());
    for (DeviceModel* model : {&eager, &captured}) {
      model->write_gradients(1);
      model->step();
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    captured.step();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (unsigned i = 2; i < 12; ++i) {
      for (DeviceModel* model : {&eager, &captured})
        model->write_gradients(i, i == 6 ? HUGE_VAL : 0.0);
      eager.step();
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    }
    EXPECT_EQ(eager.weights(), captured.weights());
    EXPECT_EQ(eager.scaler.state().scale(), captured.scaler.state().scale());
    EXPECT_EQ(eager.scaler.state().skipped(), 1);
    EXPECT_EQ(captured.scaler.state().skipped(), 1);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

TEST_F(Cuda, NcclRanksRequireATimeLimit) {
  expect_error(ErrorCode::kInvalidArgument, "time limit above 0",
               [] { nccl::NcclRanks ranks(nullptr, std::chrono::milliseconds(0)); });
}

}  // namespace
}  // namespace headroom
