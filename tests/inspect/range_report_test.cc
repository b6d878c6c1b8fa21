// RangeReport: what counts as the first bad result, what is near overflow, and the advice.
#include <headroom/ranges.h>

#include "tests/support.h"

namespace headroom {
namespace {

RangeRow row(const std::string& module, const std::string& operation, double amax,
             std::vector<int64_t> inputs = {}, DType dtype = DType::kF16) {
  RangeRow made;
  made.module = module;
  made.operation = operation;
  made.dtype = dtype;
  made.inputs = std::move(inputs);
  made.stats.count = 100;
  made.stats.amax = amax;
  return made;
}

RangeRow with_inf(RangeRow made, int64_t positive, int64_t negative = 0, int64_t nan = 0) {
  made.stats.positive_inf = positive;
  made.stats.negative_inf = negative;
  made.stats.nan = nan;
  return made;
}

RangeRow from(RangeRow made, RangeSource source, const std::string& tensor) {
  made.source = source;
  made.tensor = tensor;
  return made;
}

RangeRow gradient(RangeRow made) {
  made.direction = RangeDirection::kBackward;
  return made;
}

std::string first_bad(const RangeReport& report) {
  return report.first_bad() < 0 ? ""
                                : report.rows()[static_cast<size_t>(report.first_bad())].label();
}

TEST(RangeReport, NamesTheFirstResultThatIsNotFinite) {
  const RangeReport report({row("a", "linear", 100.0), with_inf(row("b.mlp", "mul", 5e4, {0}), 3),
                            with_inf(row("b", "add", 1.0, {0, 1}), 0, 0, 7)});
  EXPECT_EQ(first_bad(report), "b.mlp: mul");
  EXPECT_TRUE(report.inputs_finite(1));
  EXPECT_FALSE(report.inputs_finite(2));
  EXPECT_EQ(report.islands(), std::vector<std::string>{"b.mlp"});
  EXPECT_NE(report.advice()[0].find("keep_fp32(model, [\"b.mlp\"])"), std::string::npos);
}

TEST(RangeReport, PrintsEachRowOnce) {
  std::vector<RangeRow> rows(13, row("a", "mul", 6e4));
  rows[5] = with_inf(row("bad", "mul", 6e4), 1);
  const std::string text = RangeReport(rows).to_string();
  EXPECT_NE(text.find("... 1 more"), std::string::npos) << text;
  EXPECT_LT(text.find("bad"), text.find(" a: mul")) << text;
  rows.pop_back();
  EXPECT_EQ(RangeReport(rows).to_string().find(" more\n"), std::string::npos);
}

TEST(RangeReport, BlamesInputsAndParametersOnlyIfAResultIsBad) {
  const RangeRow bad =
      with_inf(from(row("embed", "", 1.0), RangeSource::kParameter, "weight"), 0, 0, 4);
  const RangeRow fine = row("embed", "embedding", 1.0, {0});
  EXPECT_EQ(first_bad(RangeReport({bad, fine})), "");
  const RangeReport report({bad, with_inf(fine, 0, 0, 1)});
  EXPECT_EQ(first_bad(report), "parameter embed.weight");
  EXPECT_NE(report.advice()[0].find("No loss scale cures it"), std::string::npos);
}

TEST(RangeReport, MasksAreNoFaultAsLongAsTheyRemainMasks) {
  const RangeRow mask =
      with_inf(from(row("attn", "masked_fill", 3.0), RangeSource::kConstant, ""), 0, 28);
  const RangeRow masked = with_inf(row("attn", "add", 3.0, {0}), 0, 28);
  EXPECT_EQ(first_bad(RangeReport({mask, masked, row("attn", "softmax", 1.0, {1})})), "");
  const RangeReport report({mask, masked, with_inf(row("attn", "softmax", 1.0, {1}), 0, 0, 4)});
  EXPECT_EQ(first_bad(report), "attn: softmax");
  EXPECT_FALSE(report.inputs_finite(2));
  // -inf that no input brought, and +inf, are faults.
  EXPECT_EQ(first_bad(RangeReport({with_inf(row("nll", "log", 1.0), 0, 2)})), "nll: log");
  EXPECT_EQ(first_bad(RangeReport({mask, with_inf(row("attn", "add", 3.0, {0}), 1, 28)})),
            "attn: add");
}

TEST(RangeReport, TheLowestNumberAsAMaskIsNotNearOverflow) {
  const RangeRow mask = from(row("", "", 65504.0), RangeSource::kInput, "attention_mask");
  const RangeReport report({mask, row("attn", "add", 65504.0, {0}), row("mlp", "linear", 9000.0)});
  EXPECT_EQ(report.near_overflow(), std::vector<int64_t>{2});
}

TEST(RangeReport, AMaskThatIsComputedIsNotNearOverflow) {
  const RangeRow mask = from(row("", "", 1.0), RangeSource::kInput, "attention_mask");
  for (const double lowest : {65504.0, 10000.0}) {  // (1 - mask) * lowest, in FP32, then a cast
    const RangeReport report({mask, row("", "sub", 1.0, {0}, DType::kF32),
                              row("", "mul", lowest, {1}, DType::kF32),
                              row("", "half", lowest, {2}), row("attn", "matmul", 50.0),
                              row("attn", "add", lowest, {3, 4}), row("attn", "softmax", 1.0, {5}),
                              row("mlp", "linear", 9000.0, {6})});
    EXPECT_EQ(report.near_overflow(), std::vector<int64_t>{7}) << lowest;
  }
  const RangeReport cast({mask, row("", "mul", 3.4028235e38, {0}, DType::kF32),
                          with_inf(row("", "half", 0.0, {1}), 0, 9),
                          with_inf(row("attn", "add", 5.0, {2}), 0, 9)});
  EXPECT_EQ(first_bad(cast), "");
}

TEST(RangeReport, ProductsThatAreNoMasksAreNearOverflow) {
  const RangeRow data = from(row("", "", 100.0), RangeSource::kInput, "x");
  const RangeRow weight = from(row("a", "", 100.0), RangeSource::kParameter, "weight");
  EXPECT_EQ(RangeReport({data, row("a", "mul", 9000.0, {0})}).near_overflow().size(), 1u);
  EXPECT_EQ(RangeReport({data, weight, row("a", "mul", 1e4, {0, 1})}).near_overflow().size(), 1u);
  const RangeRow mask = from(row("", "", 1e4), RangeSource::kInput, "mask");
  const RangeReport scores({mask, row("a", "matmul", 3e4), row("a", "add", 6e4, {0, 1})});
  EXPECT_EQ(scores.near_overflow(), (std::vector<int64_t>{2, 1})) << "not the mask's elements";
}

TEST(RangeReport, NearOverflowIsWithinThreeDoublingsNearestFirst) {
  const RangeReport report({row("a", "linear", 8187.0), row("b", "linear", 8189.0),
                            row("c", "linear", 6e4), row("d", "linear", 1e6, {}, DType::kF32)});
  EXPECT_EQ(report.near_overflow(), (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(report.islands(), (std::vector<std::string>{"b", "c"}));
  // Without any f16 tensor: what would happen in FP16.
  const RangeReport wide({row("d", "linear", 1e6, {}, DType::kBF16)});
  EXPECT_EQ(wide.near_overflow(), std::vector<int64_t>{0});
}

TEST(RangeReport, IslandsDoNotListChildrenOfIslands) {
  const RangeReport report(
      {row("a.mlp", "linear", 6e4), row("a", "add", 6e4), row("ab", "add", 6e4)});
  EXPECT_EQ(report.islands(), (std::vector<std::string>{"a", "ab"}));
}

TEST(RangeReport, KeepFp32IsAdvisedWhereItWorks) {
  const RangeRow weight = from(row("a.fc", "", 1.0), RangeSource::kParameter, "weight");
  const auto advice = [&](const std::string& module) {
    return RangeReport({weight, row(module, "linear", 6e4, {0})}).advice().at(0);
  };
  EXPECT_NE(advice("b").find("keep_fp32(model, [\"b\"])"), std::string::npos) << advice("b");
  for (const char* module : {"a", "a.fc"}) {
    EXPECT_EQ(advice(module).find("keep_fp32(model"), std::string::npos) << advice(module);
    EXPECT_NE(advice(module).find("16-bit, which keep_fp32 refuses"), std::string::npos);
  }
  EXPECT_NE(advice("a.fc2").find("keep_fp32(model, [\"a.fc2\"])"), std::string::npos);
  EXPECT_NE(advice("a\"]); f(\"").find("[\"a\\\"]); f(\\\"\"]"), std::string::npos);
}

TEST(RangeReport, AnOverflowOutsideOfAllModulesIsAnOverflow) {
  const std::string advice = RangeReport({with_inf(row("", "mul", 6e4), 3)}).advice().at(0);
  EXPECT_NE(advice.find("overflows FP16 in forward"), std::string::npos) << advice;
  EXPECT_EQ(advice.find("division by 0"), std::string::npos) << advice;
}

TEST(RangeReport, ALowerScaleCuresAnOverflowInBackwardButNotAPole) {
  const RangeReport overflow({gradient(with_inf(row("fc", "linear", 6e4), 3))});
  EXPECT_EQ(first_bad(overflow), "fc: backward of linear");
  EXPECT_NE(overflow.advice()[0].find("A lower loss scale cures it"), std::string::npos);
  const RangeReport pole({gradient(with_inf(row("norm", "sqrt", 1.0), 0, 0, 3))});
  EXPECT_NE(pole.advice()[0].find("No loss scale cures"), std::string::npos);
  EXPECT_TRUE(pole.islands().empty());
}

TEST(RangeReport, AsksForALargerScaleIfManyGradientsAreSubnormal) {
  RangeRow small = gradient(row("fc", "linear", 1.0));
  small.stats.subnormal = 50;
  const std::string advice = RangeReport({small}).advice().at(0);
  EXPECT_NE(advice.find("50.0 %"), std::string::npos) << advice;
  EXPECT_NE(advice.find("doubled 12 times"), std::string::npos) << advice;
  small.stats.amax = 3e4;
  EXPECT_NE(RangeReport({small}).advice().at(0).find("no room"), std::string::npos);
  small.stats.subnormal = 1;
  EXPECT_TRUE(RangeReport({small}).advice().empty());
}

TEST(RangeReport, RefusesInputsThatAreNotBeforeTheirRow) {
  expect_error(ErrorCode::kInvalidArgument, "not before it",
               [] { RangeReport({row("a", "linear", 1.0, {0})}); });
}

TEST(RangeReport, PrintsATable) {
  const std::string text = RangeReport({with_inf(row("b", "mul", 6e4), 3)}).to_string();
  EXPECT_NE(text.find("1 tensors measured"), std::string::npos) << text;
  EXPECT_NE(text.find("b: mul\n"), std::string::npos) << text;
  EXPECT_NE(text.back(), '\n');
  const std::string healthy = RangeReport({row("b", "mul", 6.0)}).to_string();
  EXPECT_NE(healthy.find("All results are finite"), std::string::npos) << healthy;
}

}  // namespace
}  // namespace headroom
