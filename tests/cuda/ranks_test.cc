// A scaler on the device that agrees with other ranks there. The other rank is made up: what it
// would have added is written over the message.
#include "tests/cuda/ranks.h"

#include "agree/message.h"

namespace headroom {
namespace {

using internal::Message;
using internal::RankStatus;

class MadeUpRanks : public Ranks {
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
    for (const auto& [sum, value] : sum_is) write(sums + sum, value, stream);
    for (const auto& [maximum, value] : maximum_is) write(maxima + maximum, value, stream);
  }

  std::map<int, double> sum_is, maximum_is;
  int messages = 0;

 private:
  static void write(double* to, const double& value, void* stream) {
    EXPECT_EQ(cudaMemcpyAsync(to, &value, sizeof(value), cudaMemcpyHostToDevice,
                              static_cast<cudaStream_t>(stream)),
              cudaSuccess);
  }
};

TEST_F(Cuda, RanksThatAgreeChangeNothing) {
  const auto ranks = std::make_shared<MadeUpRanks>();
  DeviceModel alone(nullptr), together(ranks);
  for (unsigned i = 0; i < 8; ++i) {
    for (DeviceModel* model : {&alone, &together}) {
      model->put(i, i == 3 ? HUGE_VAL : 0.0);
      model->step();
    }
    const StepReport report = together.scaler.report();
    EXPECT_EQ(report.applied, i != 3);
    EXPECT_EQ(report.stats.count, DeviceModel::kCount);
    if (report.applied) {
      EXPECT_EQ(report.grad_norm, alone.scaler.report().grad_norm);
    }
    EXPECT_EQ(report.culprit, i == 3 ? "rank 1: w: 1 inf, 0 nan" : "");
    EXPECT_EQ(report.stats.culprit_rank, i == 3 ? 1 : -1);
  }
  EXPECT_EQ(ranks->messages, 8);
  EXPECT_EQ(alone.weights(), together.weights());
  EXPECT_EQ(alone.scaler.save(), together.scaler.save());
}

TEST_F(Cuda, AnotherRanksOverflowSkipsTheStepOnTheDevice) {
  const auto ranks = std::make_shared<MadeUpRanks>();
  DeviceModel model(ranks, RankGradients::kSharded);
  model.put(1);
  model.step();
  ranks->sum_is = {{Message::kInf, 3.0}, {Message::kCount, 7000.0}};
  ranks->maximum_is = {{Message::kCulprit, internal::with_rank(0, 2)},
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

TEST_F(Cuda, UnscaleOnTheDeviceAgreesToo) {
  const auto ranks = std::make_shared<MadeUpRanks>();
  DeviceModel model(ranks, RankGradients::kSharded);
  model.put(1);
  const std::vector<unsigned char> before = model.weights();
  ranks->sum_is = {{Message::kNan, 1.0}};
  ranks->maximum_is = {{Message::kCulprit, internal::with_rank(0, 0)},
                       {Message::kCulpritNan, internal::with_rank(0, 1)},
                       {Message::kCulpritInf, internal::with_rank(0, 0)}};
  Host one(DType::kF32, 1, 1);
  OnDevice loss(one.view()), scaled(one.view());
  model.scaler.scale(loss.view(), scaled.view());
  model.scaler.unscale_(model.optimizer);
  ranks->sum_is.clear();
  ranks->maximum_is.clear();
  model.scaler.step(model.optimizer);
  const StepReport report = model.scaler.report();
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(report.culprit, "rank 0: w: 0 inf, 1 nan");
  EXPECT_EQ(model.weights(), before);
}

TEST_F(Cuda, RanksThatDifferAreFoundOnTheDevice) {
  const auto ranks = std::make_shared<MadeUpRanks>();
  DeviceModel model(ranks);
  model.put(1);
  model.step();
  const std::vector<unsigned char> before = model.weights();
  const int scale = Message::kStatus + 2 * RankStatus::kScale;
  ranks->maximum_is = {{scale, 2048.0}};
  // The host may know at the end of this step, or of a later call; the weights stay in any case.
  expect_error(ErrorCode::kRanksDiffer, "different scales, 1024 and 2048", [&] {
    model.step();
    model.scaler.report();
  });
  EXPECT_EQ(model.weights(), before);
}

TEST_F(Cuda, AnOptimizerWithoutGradientsTakesPartOnTheDevice) {
  const auto ranks = std::make_shared<MadeUpRanks>();
  GradScaler scaler(
      DynamicScale{},
      {.device = {DeviceType::kCUDA, 0}, .ranks = ranks, .gradients = RankGradients::kSharded});
  AdamW optimizer({});
  Host one(DType::kF32, 1, 1);
  OnDevice loss(one.view()), scaled(one.view());
  scaler.scale(loss.view(), scaled.view());
  ranks->sum_is = {{Message::kSquares + 1, 0x1p34}};
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(scaler.report().applied);
  EXPECT_EQ(scaler.report().grad_norm, 2.0);
  EXPECT_EQ(ranks->messages, 1);
}

}  // namespace
}  // namespace headroom
