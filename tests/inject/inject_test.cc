#include <gtest/gtest.h>
#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <bit>
#include <cmath>

#include "tests/support.h"

namespace headroom {
namespace {

struct Model {
  std::vector<float> a = std::vector<float>(100, 1.0f);
  std::vector<f16> b = std::vector<f16>(50, f16(1.0f));
  std::vector<bf16> c = std::vector<bf16>(50, bf16(1.0f));
  std::vector<double> d = std::vector<double>(10, 1.0);
  std::vector<Parameter> parameters = {{"a", {}, view(a)},
                                       {"b", {}, view(b)},
                                       {"c", {}, view(c)},
                                       {"d", {}, view(d)},
                                       {"none", {}, {}}};
};

GradStats measure_gradients(const std::vector<Parameter>& parameters) {
  std::vector<TensorView> grads;
  for (const Parameter& parameter : parameters) grads.push_back(parameter.grad);
  return measure(grads);
}

TEST(Inject, InjectsTheRequestedKindIntoTheRequestedTensor) {
  for (const char* tensor : {"a", "b", "c", "d"}) {
    Model model;
    const std::string where = std::string("tensor=") + tensor;
    const auto done = Injector(parse_faults("nan:" + where)).inject(1, model.parameters);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(model.parameters[done[0].parameter].name, tensor);
    EXPECT_EQ(measure_gradients(model.parameters).nan_count, 1) << tensor;
    EXPECT_EQ(measure_gradients(model.parameters).inf_count, 0) << tensor;
    Injector(parse_faults("overflow:" + where + ",count=3"), 4).inject(1, model.parameters);
    EXPECT_GE(measure_gradients(model.parameters).inf_count, 2)
        << tensor;  // one of three may hit the NaN
  }
  Model model;
  const auto done = Injector(parse_faults("flip:tensor=a")).inject(1, model.parameters);
  const auto bits = std::bit_cast<uint32_t>(model.a[static_cast<size_t>(done[0].index)]);
  EXPECT_EQ(std::popcount(bits ^ std::bit_cast<uint32_t>(1.0f)), 1);
}

TEST(Inject, InjectsTheRequestedNumberOfElements) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Model model;
    Injector(parse_faults("overflow:tensor=d,count=10"), seed).inject(1, model.parameters);
    EXPECT_EQ(measure_gradients(model.parameters).inf_count, 10) << seed;
    Model other;
    const auto done =
        Injector(parse_faults("flip:tensor=d,count=99"), seed).inject(1, other.parameters);
    EXPECT_EQ(done.size(), 10u);
  }
}

TEST(Inject, ChangesNothingIfOneFaultCannotBeInjected) {
  Model model;
  model.parameters[1].grad.read_only = true;
  const Injector injector(parse_faults("nan:tensor=a,nan:tensor=b"));
  expect_error(ErrorCode::kInvalidArgument, "b", [&] { injector.inject(1, model.parameters); });
  EXPECT_EQ(measure_gradients(model.parameters).nan_count, 0);
}

TEST(Inject, FaultRateFollowsTheProbability) {
  Model model;
  const Injector injector(parse_faults("overflow:p=0.01,nan:p=0.2"), 7);
  int64_t inf = 0, nan = 0;
  std::vector<int64_t> hits(model.parameters.size(), 0);
  for (int64_t step = 0; step < 20000; ++step) {
    for (const Injected& item : injector.inject(step, model.parameters)) {
      (item.kind == FaultKind::kNan ? nan : inf) += 1;
      hits[item.parameter] += 1;
    }
  }
  EXPECT_NEAR(static_cast<double>(inf), 200.0, 60.0);
  EXPECT_NEAR(static_cast<double>(nan), 4000.0, 250.0);
  for (size_t i = 0; i < 4; ++i) EXPECT_GT(hits[i], 800) << "tensors are hit uniformly";
  EXPECT_EQ(hits[4], 0);
}

TEST(Inject, FaultsDependOnSeedAndStepOnly) {
  const auto faults = parse_faults("flip:p=0.5,count=2");
  Model one, two, other;
  const Injector a(faults, 3), b(faults, 3), c(faults, 4);
  bool differs = false;
  for (int64_t step = 0; step < 50; ++step) a.inject(step, one.parameters);
  for (int64_t step = 49; step >= 0; --step) b.inject(step, two.parameters);
  for (int64_t step = 0; step < 50; ++step) c.inject(step, other.parameters);
  for (size_t i = 0; i < one.a.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(one.a[i]), std::bit_cast<uint32_t>(two.a[i]));
    differs |= std::bit_cast<uint32_t>(one.a[i]) != std::bit_cast<uint32_t>(other.a[i]);
  }
  EXPECT_TRUE(differs);
}

TEST(Inject, FaultsAreLimitedToTheirStepsAndRank) {
  Model model;
  const auto faults = parse_faults("nan:step=5,rank=1");
  EXPECT_TRUE(Injector(faults, 0, 0).inject(5, model.parameters).empty());
  EXPECT_TRUE(Injector(faults, 0, 1).inject(4, model.parameters).empty());
  EXPECT_EQ(Injector(faults, 0, 1).inject(5, model.parameters).size(), 1u);
  EXPECT_TRUE(faults[0].applies(1, 5));
  EXPECT_FALSE(faults[0].applies(0, 5));
  const Fault range = parse_faults("flip:step=10-20")[0];
  EXPECT_TRUE(range.applies(7, 10) && range.applies(7, 20));
  EXPECT_FALSE(range.applies(7, 9) || range.applies(7, 21));
}

TEST(Inject, EntryWithoutAKindExtendsThePreviousFault) {
  const auto faults = parse_faults("overflow:p=0.01,nan:p=0.001,tensor=a=b:c,rank=1,step=5,flip");
  ASSERT_EQ(faults.size(), 3u);
  EXPECT_EQ(faults[0].probability, 0.01);
  EXPECT_EQ(faults[1].kind, FaultKind::kNan);
  EXPECT_EQ(faults[1].tensor, "a=b:c");
  EXPECT_EQ(faults[1].rank, 1);
  EXPECT_EQ(faults[1].first_step, 5);
  EXPECT_EQ(faults[2].kind, FaultKind::kFlip);
  EXPECT_EQ(faults[2].probability, 1.0);
}

TEST(Inject, InvalidFaultTextIsRefused) {
  const auto expect_refused = [](const std::string& text, const char* part) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { parse_faults(text); });
  };
  expect_refused("", "There is no fault ''");
  expect_refused("infinity:p=1", "There is no fault 'infinity'");
  expect_refused("p=0.5", "begin with a kind");
  expect_refused("nan:p=x", "needs a probability");
  expect_refused("nan:p=2", "from 0 to 1");
  expect_refused("nan:p=nan", "from 0 to 1");
  expect_refused("nan:p=", "needs a probability");
  expect_refused("nan:step=", "needs a step");
  expect_refused("nan:step=5-", "needs a step");
  expect_refused("nan:step=9-5", "not after the last");
  expect_refused("nan:step=-5", "needs a step");
  expect_refused("nan:rank=-1", "a rank of 0 or more");
  expect_refused("nan:count=0", "1 or more");
  expect_refused("nan:tensor=", "name of a parameter");
  expect_refused("nan:often=1", "has no entry 'often'");
  expect_refused("nan:p=0.5,", "There is no fault ''");
  expect_refused(std::string(1000, 'x') + ":p=1", "xxx...'");
  Model model;
  expect_error(ErrorCode::kInvalidArgument, "no parameter of that name",
               [&] { Injector(parse_faults("nan:tensor=z")).inject(1, model.parameters); });
  EXPECT_EQ(measure_gradients(model.parameters).nan_count, 0);
}

}  // namespace
}  // namespace headroom
