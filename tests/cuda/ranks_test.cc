// A device scaler that agrees with another rank on the device. The other rank is simulated: its
// contribution overwrites fields of the message.
#include "tests/cuda/ranks.h"

#include "agree/message.h"

namespace headroom {
namespace {

using internal::Message;
using internal::RankStatus;

class SimulatedRanks : public Ranks {
 public:
  int rank() const override { return 1; }
  int size() const override { return 2; }
  void reduce(double*, size_t, double*, size_t) override { FAIL(); }
  bool enqueues() const override { return true; }
  void enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
               void* stream) override {
    EXPECT_EQ(sum_count, static_cast<size_t>(Message::kSums));
    EXPECT_EQ(maximum_count, static_cast<size_t>(Message::kMaxima));
    ++messages;
    for (const auto& [sum, value] : sum_overrides) write(sums + sum, value, stream);
    for (const auto& [maximum, value] : maximum_overrides) write(maxima + maximum, value, stream);
  }

  std::map<int, double> sum_overrides, maximum_overrides;
  int messages = 0;

 private:
  static void write(double* to, const double& value, void* stream) {
    EXPECT_EQ(cudaMemcpyAsync(to, &value, sizeof(value), cudaMemcpyHostToDevice,
                              static_cast<cudaStream_t>(stream)),
              cudaSuccess);
  }
};

TEST_F(Cuda, AgreeingRanksMatchASingleProcess) {
  const auto ranks = std::make_shared<SimulatedRanks>();
  DeviceModel single(nullptr), with_ranks(ranks);
  for (unsigned i = 0; i < 8; ++i) {
    for (DeviceModel* model : {&single, &with_ranks}) {
      model->write_gradients(i, i == 3 ? HUGE_VAL : 0.0);
      model->step();
    }
    const StepReport report = with_ranks.scaler.report();
    EXPECT_EQ(report.applied, i != 3);
    EXPECT_EQ(report.stats.count, DeviceModel::kCount);
    if (report.applied) {
      EXPECT_EQ(report.grad_norm, single.scaler.report().grad_norm);
    }
    EXPECT_EQ(report.culprit, i == 3 ? "rank 1: w: 1 inf, 0 nan" : "");
    EXPECT_EQ(report.stats.culprit_rank, i == 3 ? 1 : -1);
  }
  EXPECT_EQ(ranks->messages, 8);
  EXPECT_EQ(single.weights(), with_ranks.weights());
  EXPECT_EQ(single.scaler.save(), with_ranks.scaler.save());
}

TEST_F(Cuda, OverflowOnAnotherRankSkipsTheDeviceStep) {
  const auto ranks = std::make_shared<SimulatedRanks>();
  DeviceModel model(ranks, RankGradients::kSharded);
  model.write_gradients(1);
  model.step();
  ranks->sum_overrides = {{Message::kInf, 3.0}, {Message::kCount, 7000.0}};
  ranks->maximum_overrides = {{Message::kCulprit, internal::with_rank(0, 2)},
                              {Message::kCulpritInf, internal::with_rank(0, 3)},
                              {Message::kCulpritNan, internal::with_rank(0, 0)},
                              {Message::kNames, 1e10}};
  const std::vector<unsigned char> before = model.weights();
  model.step();
  const StepReport report = model.scaler.report();
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.culprit, "rank 0: its gradient 2: 3 inf, 0 nan");
  EXPECT_EQ(report.stats.count, 7000);
  EXPECT_EQ(report.stats.inf_count, 3);
  EXPECT_EQ(model.weights(), before);
  EXPECT_EQ(model.scaler.get_scale(), 512.0f);
}

TEST_F(Cuda, DeviceUnscaleAgreesAcrossRanks) {
  const auto ranks = std::make_shared<SimulatedRanks>();
  DeviceModel model(ranks, RankGradients::kSharded);
  model.write_gradients(1);
  const std::vector<unsigned char> before = model.weights();
  ranks->sum_overrides = {{Message::kNan, 1.0}};
  ranks->maximum_overrides = {{Message::kCulprit, internal::with_rank(0, 0)},
                              {Message::kCulpritNan, internal::with_rank(0, 1)},
                              {Message::kCulpritInf, internal::with_rank(0, 0)}};
  HostTensor one(DType::kF32, 1, 1);
  DeviceCopy loss(one.view()), scaled(one.view());
  model.scaler.scale(loss.view(), scaled.view());
  model.scaler.unscale_(model.optimizer);
  ranks->sum_overrides.clear();
  ranks->maximum_overrides.clear();
  model.scaler.step(model.optimizer);
  const StepReport report = model.scaler.report();
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.culprit, "rank 0: w: 0 inf, 1 nan");
  EXPECT_EQ(model.weights(), before);
}

TEST_F(Cuda, DivergedRanksAreDetectedOnTheDevice) {
  const auto ranks = std::make_shared<SimulatedRanks>();
  DeviceModel model(ranks);
  model.write_gradients(1);
  model.step();
  const std::vector<unsigned char> before = model.weights();
  const int scale = Message::kStatus + 2 * RankStatus::kScale;
  ranks->maximum_overrides = {{scale, 2048.0}};
  // The host may learn of it in this step or in a later call; the weights never change.
  expect_error(ErrorCode::kRanksDiffer, "different scales, 1024 and 2048", [&] {
    model.step();
    model.scaler.report();
  });
  EXPECT_EQ(model.weights(), before);
}

TEST_F(Cuda, RankWithoutGradientsParticipatesOnTheDevice) {
  const auto ranks = std::make_shared<SimulatedRanks>();
  GradScaler scaler(
      DynamicScale{},
      {.device = {DeviceType::kCUDA, 0}, .ranks = ranks, .gradients = RankGradients::kSharded});
  AdamW optimizer({});
  HostTensor one(DType::kF32, 1, 1);
  DeviceCopy loss(one.view()), scaled(one.view());
  scaler.scale(loss.view(), scaled.view());
  ranks->sum_overrides = {{Message::kSquares + 1, 0x1p34}};
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(scaler.report().applied);
  EXPECT_EQ(scaler.report().grad_norm, 2.0);
  EXPECT_EQ(ranks->messages, 1);
}

}  // namespace
}  // namespace headroom
