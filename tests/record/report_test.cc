#include <gtest/gtest.h>
#include <headroom/record.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "record/report.h"
#include "tests/record/folder.h"
#include "tests/support.h"

namespace headroom {
namespace {

using nlohmann::json;

// The JSON embedded in a report.
json parse_data(const std::string& html) {
  const std::string open = "id=\"data\">";
  const size_t begin = html.find(open) + open.size();
  return json::parse(html.substr(begin, html.find("</script>", begin) - begin));
}

internal::HistoryStep make_step(int64_t step, double loss, double scale, bool applied = true) {
  internal::HistoryStep made;
  made.step = step;
  made.loss = loss;
  made.scale = scale;
  made.applied = applied;
  if (!applied) made.culprit = "w: 1 inf, 0 nan";
  return made;
}

json report_of_run(const internal::History& history) {
  return json::parse(internal::report_data("t", {{"", &history, false}}))["runs"][0];
}

TEST(Report, RunWithoutStepsHasAReport) {
  const Folder folder;
  { Recorder recorder(folder.path("run")); }
  write_report(folder.path("run"));
  const json data = parse_data(folder.read("run/report.html"));
  EXPECT_EQ(data["runs"][0]["count"], 0);
  EXPECT_EQ(data["runs"][0]["end"], "");
}

TEST(Report, HostileNamesAreShownAsText) {
  const Folder folder;
  const std::string evil = "</script><script>alert(1)</script>\"'&\xE2\x82\xAC\xFF";
  std::vector<float> grad = {1.0f};
  RunInfo info;
  info.name = evil;
  info.settings = {{evil, evil}};
  Recorder recorder(folder.path("run"), info);
  recorder.layers(1, 1.0, measure_layers({{evil, {}, view(grad)}}));
  StepReport report;
  report.culprit = evil;
  recorder.step(1, 1.0, report);
  recorder.finish({{evil, 1.0}}, evil);
  write_report(folder.path("run"));
  const std::string html = folder.read("run/report.html");
  EXPECT_EQ(html.find("alert(1)</script>"), std::string::npos);
  const json run = parse_data(html)["runs"][0];
  const std::string kept = "</script><script>alert(1)</script>\"'&\xE2\x82\xAC\xEF\xBF\xBD";
  EXPECT_EQ(run["layers"][0]["name"], kept);
  EXPECT_EQ(run["skips"][0][2], kept);
}

TEST(Report, LongRunsAreThinnedButKeepTheirExtremes) {
  internal::History history;
  constexpr int64_t kSteps = 100000;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const double loss = step == 33333   ? 1e6
                        : step == 77777 ? 1e-6
                                        : 1.0 + 1e-3 * static_cast<double>(step % 7);
    history.steps.push_back(make_step(step, step == 5000 ? NAN : loss, 1024.0, step % 50 != 0));
  }
  history.skipped = kSteps / 50;
  const json run = report_of_run(history);
  const json& values = run["loss"][1];
  EXPECT_LE(values.size(), 20000u);
  EXPECT_EQ(run["loss"][0].back(), kSteps);
  EXPECT_EQ(run["loss"][0].size(), values.size());
  double low = HUGE_VAL, high = 0.0;
  int gaps = 0;
  for (const json& value : values) {
    if (value.is_null()) {
      ++gaps;
      continue;
    }
    low = std::min(low, value.get<double>());
    high = std::max(high, value.get<double>());
  }
  EXPECT_EQ(low, 1e-6);
  EXPECT_EQ(high, 1e6);
  EXPECT_EQ(gaps, 1) << "the NaN loss is kept as a gap";
  EXPECT_LE(run["skips"].size(), 2000u);
  EXPECT_GE(run["skips"].size(), 1000u);
  EXPECT_EQ(run["skipped"], kSteps / 50);
  EXPECT_EQ(run["scale"][0], json({1, kSteps})) << "only the ends of a constant curve";
  EXPECT_LT(internal::report_data("t", {{"", &history, false}}).size(), 900000u);
}

TEST(Report, CurvesHaveABoundedNumberOfPoints) {
  for (const int64_t steps : {20'000, 20'001, 30'001, 60'000, 299'999}) {
    internal::History history;
    for (int64_t step = 1; step <= steps; ++step) {
      const double loss = step % 4 == 0 ? NAN : static_cast<double>(step % 7);
      history.steps.push_back(make_step(step, loss, step % 2 ? 1.0 : 2.0));
    }
    const json run = report_of_run(history);
    for (const char* curve : {"loss", "scale"}) {
      EXPECT_LE(run[curve][0].size(), 20'000u) << curve << " of " << steps;
      EXPECT_GE(run[curve][0].size(), 5'000u) << curve << " of " << steps;
      EXPECT_EQ(run[curve][0].back(), steps);
    }
  }
}

// The page shows the steps of the loss curve, and must be able to say which of them were skipped.
TEST(Report, EverySkippedStepOfTheLossCurveIsListed) {
  internal::History history;
  for (int64_t step = 1; step <= 50'000; ++step) {
    history.steps.push_back(make_step(step, static_cast<double>(step % 11), 2.0, step % 3 == 0));
    history.skipped += step % 3 != 0;
  }
  const json run = report_of_run(history);
  std::set<int64_t> skips;
  size_t with_culprit = 0;
  for (const json& skip : run["skips"]) {
    skips.insert(skip[0].get<int64_t>());
    with_culprit += !skip[2].get<std::string>().empty();
  }
  for (const json& step : run["loss"][0]) {
    EXPECT_EQ(skips.contains(step.get<int64_t>()), step.get<int64_t>() % 3 != 0) << step;
  }
  EXPECT_LE(with_culprit, 1500u);
  EXPECT_GE(with_culprit, 750u);
}

// A tooltip compares runs at one step, so their curves need steps in common.
TEST(Report, ThinnedCurvesOfDifferentLengthHaveStepsInCommon) {
  internal::History a, b;
  for (int64_t step = 1; step <= 70'000; ++step) {
    a.steps.push_back(make_step(step, static_cast<double>(step * 7 % 101), 2.0));
    if (step <= 25'000)
      b.steps.push_back(make_step(step, static_cast<double>(step * 5 % 103), 2.0));
  }
  const json runs =
      json::parse(internal::report_data("t", {{"a", &a, false}, {"b", &b, false}}))["runs"];
  std::set<json> of_a(runs[0]["loss"][0].begin(), runs[0]["loss"][0].end());
  size_t common = 0;
  for (const json& step : runs[1]["loss"][0]) common += of_a.contains(step);
  EXPECT_GE(common, 700u);
}

TEST(Report, BoundsAreThoseOfThePrecision) {
  for (const auto& [precision, lost, doublings] :
       {std::tuple("fp16", 1.0, 55.9993), std::tuple("bf16", 0.0, 167.994),
        std::tuple("bf16-mixed", 0.0, 167.994), std::tuple("fp32", 0.0, 168.0)}) {
    internal::History history;
    history.settings = {{"precision", precision}};
    internal::LayerSnapshot look;
    internal::HistoryLayer layer;
    layer.count = 1;
    layer.amax = 0x1p-40;
    layer.from = -40;
    layer.histogram = {1};
    look.layers["w"] = layer;
    history.extremes["w"] = {};
    history.snapshots.push_back(look);
    const json run = report_of_run(history);
    EXPECT_EQ(run["bounds"]["overflow"], "w");
    EXPECT_NEAR(run["bounds"]["doublings"].get<double>(), doublings, 1e-3) << precision;
    EXPECT_EQ(run["bounds"]["lost"], lost) << precision;
    EXPECT_EQ(run["bounds"]["underflow"], lost > 0.0 ? "w" : "") << precision;
  }
}

TEST(Report, RateIsThatOfTheLastHalfMinute) {
  internal::History history;
  history.settings = {{"steps", "5000"}};
  for (int64_t step = 1; step <= 1000; ++step) {  // 1 step per second, then 10
    history.steps.push_back(make_step(step, 1.0, 2.0));
    const auto at = static_cast<double>(step);
    history.steps.back().seconds = step <= 500 ? at : 500.0 + (at - 500.0) / 10.0;
  }
  EXPECT_EQ(report_of_run(history)["rate"], 10.0);
  EXPECT_EQ(report_of_run(history)["planned"], 5000);
  history.steps.resize(1);
  history.settings = {{"steps", "many"}};
  EXPECT_TRUE(report_of_run(history)["rate"].is_null());
  EXPECT_TRUE(report_of_run(history)["planned"].is_null());
}

TEST(Report, Lists1500SkipsInFull) {
  internal::History history;
  for (int64_t step = 1; step <= 1500; ++step) {
    history.steps.push_back(make_step(step, 1.0, 2.0, false));
  }
  history.skipped = 1500;
  EXPECT_EQ(report_of_run(history)["skips"].size(), 1500u);
}

TEST(Report, ManyLayersGiveABoundedSize) {
  internal::History history;
  for (int64_t step = 1; step <= 400; ++step) {
    internal::LayerSnapshot look;
    look.step = step;
    for (int i = 0; i < 300; ++i) {
      internal::HistoryLayer layer;
      layer.count = 30;
      layer.from = -20;
      layer.histogram.assign(30, 1);
      look.layers["layer." + std::to_string(i)] = layer;
      history.extremes["layer." + std::to_string(i)] = {};
    }
    history.snapshots.push_back(look);
  }
  const std::string data = internal::report_data("t", {{"", &history, false}});
  EXPECT_LT(data.size(), 2000000u);
  const json run = json::parse(data)["runs"][0];
  EXPECT_EQ(run["layers"].size(), 300u);
  EXPECT_EQ(run["snapshots"]["steps"].front(), 1);
  EXPECT_EQ(run["snapshots"]["steps"].back(), 400);
}

TEST(Report, LayersAreSortedByWorstUnderflow) {
  const Folder folder;
  std::vector<float> fine = {1.0f}, lost = {0x1p-30f}, subnormal = {0x1p-20f};
  Recorder recorder(folder.path("run"));
  recorder.layers(1, 1.0,
                  measure_layers({{"a.fine", {}, view(fine)},
                                  {"b.subnormal", {}, view(subnormal)},
                                  {"c.lost", {}, view(lost)}}));
  write_report(folder.path("run"));
  const json run = parse_data(folder.read("run/report.html"))["runs"][0];
  EXPECT_EQ(run["layers"][0]["name"], "c.lost");
  EXPECT_EQ(run["layers"][1]["name"], "b.subnormal");
  EXPECT_EQ(run["bounds"]["underflow"], "c.lost");
  EXPECT_EQ(run["bounds"]["overflow"], "a.fine");
}

TEST(Report, FolderReportContainsEveryRun) {
  const Folder folder;
  for (const char* name : {"runs/b", "runs/a", "runs/1/2/3/4/5/6/7/8/c", "elsewhere"}) {
    Recorder recorder(folder.path(name));
    recorder.finish();
  }
  std::filesystem::create_directory_symlink(folder.path("elsewhere"), folder.path("runs/link"));
  std::filesystem::create_directory_symlink(folder.path("runs"), folder.path("runs/loop"));
  write_report(folder.path("runs"), folder.path("mine.html"));
  EXPECT_FALSE(std::filesystem::exists(folder.path("runs/report.html")));
  const json runs = parse_data(folder.read("mine.html"))["runs"];
  EXPECT_EQ(runs.size(), 4u);
}

TEST(Report, FolderReportOmitsUnreadableRunsAndListsThem) {
  const Folder folder;
  { Recorder(folder.path("runs/good")).finish(); }
  folder.write("runs/empty/history.jsonl", "");
  folder.write("runs/bad/history.jsonl", folder.read("runs/good/history.jsonl") + "garbage\n");
  std::vector<std::string> left_out;
  write_report(folder.path("runs"), "", &left_out);
  ASSERT_EQ(left_out.size(), 2u);
  EXPECT_NE(left_out[0].find("bad/history.jsonl:3: "), std::string::npos) << left_out[0];
  EXPECT_NE(left_out[1].find("empty/history.jsonl:1: "), std::string::npos) << left_out[1];
  const json data = parse_data(folder.read("runs/report.html"));
  EXPECT_EQ(data["runs"].size(), 1u);
  EXPECT_EQ(data["left_out"], left_out);
  std::filesystem::remove_all(folder.path("runs/good"));
  expect_error(ErrorCode::kBadState,
               "bad/history.jsonl:3: ", [&] { write_report(folder.path("runs")); });
}

TEST(Report, MissingRunsAndUnwritablePathsAreRefused) {
  const Folder folder;
  folder.write("empty/other.txt", "x");
  expect_error(ErrorCode::kFile, "There is no run in", [&] { write_report(folder.path("empty")); });
  expect_error(ErrorCode::kFile, "There is no folder",
               [&] { write_report(folder.path("nowhere")); });
  { Recorder recorder(folder.path("run")); }
  expect_error(ErrorCode::kFile, "could not be written",
               [&] { write_report(folder.path("run"), folder.path("no/such/x.html")); });
  expect_error(ErrorCode::kFile, "the disk is full",
               [&] { write_report(folder.path("run"), "/dev/full"); });
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
}

// The default path refuses links and pipes; a path given by the caller is used as it is.
TEST(Report, FollowsLinksOnlyInPathsGivenByTheCaller) {
  const Folder folder;
  { Recorder recorder(folder.path("run")); }
  folder.write("victim", "precious");
  const std::string own = folder.path("run/report.html");
  std::filesystem::create_symlink(folder.path("victim"), own);
  expect_error(ErrorCode::kFile, "it is a symbolic link",
               [&] { write_report(folder.path("run")); });
  std::filesystem::remove(own);
  ASSERT_EQ(mkfifo(own.c_str(), 0600), 0);
  expect_error(ErrorCode::kFile, "it is a pipe", [&] { write_report(folder.path("run")); });
  EXPECT_EQ(folder.read("victim"), "precious");
  std::filesystem::create_symlink(folder.path("victim"), folder.path("link"));
  write_report(folder.path("run"), folder.path("link"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder.path("link")));
  EXPECT_TRUE(folder.read("victim").starts_with("<!doctype html>"));
  write_report(folder.path("run"), "/dev/null");
}

// Anyone who may write to the folder can predict process ids, so temporary names must not be
// derived from them: a link planted under the predicted name would be followed.
TEST(Report, TemporaryFileNamesCannotBeGuessed) {
  const Folder folder;
  { Recorder recorder(folder.path("run")); }
  folder.write("victim", "precious");
  const std::string guessed = folder.path("run/report.html.") + std::to_string(getpid()) + ".tmp";
  std::filesystem::create_symlink(folder.path("victim"), guessed);
  const mode_t before = umask(027);
  write_report(folder.path("run"));
  umask(before);
  EXPECT_EQ(folder.read("victim"), "precious");
  EXPECT_TRUE(std::filesystem::is_symlink(guessed));
  const std::string own = folder.path("run/report.html");
  EXPECT_TRUE(std::filesystem::is_regular_file(std::filesystem::symlink_status(own)));
  EXPECT_EQ(std::filesystem::status(own).permissions(), std::filesystem::perms(0640));
}

}  // namespace
}  // namespace headroom
