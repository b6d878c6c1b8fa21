#include <gtest/gtest.h>
#include <headroom/record.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "record/history.h"
#include "record/report.h"
#include "tests/record/folder.h"
#include "tests/support.h"

namespace headroom {
namespace {

using internal::HistoryReader;
using nlohmann::json;

StepReport skipped_report(const std::string& culprit) {
  StepReport report;
  report.scale = 1024.0f;
  report.grad_norm = HUGE_VAL;
  report.culprit = culprit;
  return report;
}

std::vector<LayerStats> make_layers(float value = 1.0f) {
  std::vector<float> grad = {value, value, 0.0f};
  return measure_layers({{"w", {}, view(grad)}});
}

TEST(Recorder, WritesAHeaderAndOneLinePerStep) {
  const Folder folder;
  RunInfo info;
  info.name = "mine";
  info.policy = preset("megatron");
  info.settings = {{"z", "first"}, {"a", "second"}};
  Recorder recorder(folder.path("deep/run"), info);
  recorder.step(1, 2.5, applied(), {{"lr", 1e-3}});
  recorder.step(2, NAN, skipped_report("w: 3 inf, 0 nan"));
  recorder.finish({{"accuracy", 0.9}});
  std::istringstream lines(folder.read("deep/run/history.jsonl"));
  std::string line;
  std::getline(lines, line);
  const json header = json::parse(line);
  EXPECT_EQ(header["format"], "headroom-history");
  EXPECT_EQ(header["version"], 1);
  EXPECT_EQ(header["name"], "mine");
  EXPECT_EQ(header["policy"]["hysteresis"], preset("megatron").dynamic().hysteresis);
  EXPECT_LT(line.find("\"z\""), line.find("\"a\"")) << "settings keep their order";
  std::getline(lines, line);
  const json first = json::parse(line);
  EXPECT_EQ(first["step"], 1);
  EXPECT_EQ(first["loss"], 2.5);
  EXPECT_EQ(first["scale"], 1024.0);
  EXPECT_EQ(first["overflow"], false);
  EXPECT_EQ(first["grad_norm"], 0.5);
  EXPECT_EQ(first["lr"], 1e-3);
  EXPECT_FALSE(first.contains("culprit"));
  std::getline(lines, line);
  const json second = json::parse(line);
  EXPECT_EQ(second["loss"], "nan");
  EXPECT_EQ(second["grad_norm"], "inf");
  EXPECT_EQ(second["overflow"], true);
  EXPECT_EQ(second["culprit"], "w: 3 inf, 0 nan");
  std::getline(lines, line);
  const json end = json::parse(line);
  EXPECT_EQ(end["end"], "finished");
  EXPECT_EQ(end["steps"], 2);
  EXPECT_EQ(end["skipped"], 1);
  EXPECT_EQ(end["results"]["accuracy"], 0.9);
}

TEST(Recorder, HistoryRoundTripsThroughTheReader) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  recorder.layers(1, 65536.0, make_layers(0x1p-30f));
  recorder.step(1, HUGE_VAL, applied(65536.0f));
  recorder.step(7, 1e300, skipped_report("evil \"name\"\n</script>: 1 inf, 0 nan"));
  recorder.finish({{"loss", -HUGE_VAL}}, "stopped by hand");
  HistoryReader reader(folder.path("run/history.jsonl"));
  EXPECT_TRUE(reader.read_more());
  const internal::History& history = reader.history();
  EXPECT_EQ(history.name, "run");
  ASSERT_EQ(history.steps.size(), 2u);
  EXPECT_EQ(history.steps[0].loss, HUGE_VAL);
  EXPECT_EQ(history.steps[1].loss, 1e300);
  EXPECT_EQ(history.steps[1].culprit, "evil \"name\"\n</script>: 1 inf, 0 nan");
  EXPECT_EQ(history.skipped, 1);
  ASSERT_EQ(history.snapshots.size(), 1u);
  EXPECT_EQ(history.snapshots[0].first_to_overflow, "w");
  EXPECT_EQ(history.snapshots[0].first_to_underflow, "w");
  EXPECT_EQ(history.snapshots[0].lost, 1.0);
  const internal::HistoryLayer& layer = history.snapshots[0].layers.at("w");
  EXPECT_EQ(layer.from, -30);
  EXPECT_EQ(layer.histogram, std::vector<int64_t>{2});
  EXPECT_EQ(layer.zeros, 1);
  EXPECT_EQ(history.end, "stopped by hand");
  EXPECT_EQ(history.results[0].second, -HUGE_VAL);
  EXPECT_FALSE(reader.cut());
}

// A killed run leaves all its steps.
TEST(Recorder, EachStepIsWrittenImmediately) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  HistoryReader reader(folder.path("run/history.jsonl"));
  for (int64_t step = 1; step <= 3; ++step) {
    recorder.step(step, 1.0, applied());
    EXPECT_TRUE(reader.read_more());
    EXPECT_EQ(reader.history().steps.size(), static_cast<size_t>(step));
    EXPECT_FALSE(reader.read_more());
  }
  EXPECT_TRUE(reader.history().end.empty());
}

TEST(Recorder, SecondWriterOfAFolderIsRefused) {
  const Folder folder;
  {
    Recorder first(folder.path("run"));
    first.step(1, 1.0, applied());
    expect_error(ErrorCode::kFile, "is being written by another run",
                 [&] { Recorder second(folder.path("run")); });
    first.step(2, 1.0, applied());
  }
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  EXPECT_EQ(reader.history().steps.size(), 2u) << "the first history is complete";
  Recorder later(folder.path("run"));  // replaces the history
  HistoryReader fresh(folder.path("run/history.jsonl"));
  fresh.read_more();
  EXPECT_TRUE(fresh.history().steps.empty());
}

TEST(Recorder, ResumedHistoryHasNoDuplicateSteps) {
  const Folder folder;
  RunInfo info;
  info.tensorboard = true;
  {
    Recorder recorder(folder.path("whole"), info);
    Recorder killed(folder.path("run"), info);
    for (int64_t step = 1; step <= 5; ++step) {
      for (Recorder* one : {&recorder, &killed}) {
        one->layers(step, 1.0, make_layers());
        one->step(step, 0.5 * static_cast<double>(step),
                  step == 2 ? skipped_report("w") : applied());
      }
    }
    killed.finish();
    recorder.finish();
  }
  const std::string cut = folder.read("run/history.jsonl") + "{\"step\":6,\"lo";
  folder.write("run/history.jsonl", cut);
  info.resume = true;
  {
    Recorder recorder(folder.path("run"), info);
    recorder.rewind(3);
    recorder.note(3, "resumed");
    for (int64_t step = 4; step <= 5; ++step) {
      recorder.layers(step, 1.0, make_layers());
      recorder.step(step, 0.5 * static_cast<double>(step), applied());
    }
    recorder.finish();
  }
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  const internal::History& history = reader.history();
  ASSERT_EQ(history.steps.size(), 5u);
  EXPECT_EQ(history.steps[4].loss, 2.5);
  EXPECT_EQ(history.skipped, 1);
  ASSERT_EQ(history.notes.size(), 1u);
  EXPECT_EQ(history.notes[0].text, "resumed");
  EXPECT_EQ(history.end, "finished");
  EXPECT_GE(history.steps[3].seconds, history.steps[2].seconds) << "the time does not restart";
  write_report(folder.path("run"));
  EXPECT_NE(folder.read("run/report.html").find("[3,\"resumed\"]"), std::string::npos);
  const auto size = [&](const char* run) {
    return folder.read(std::string(run) + "/events.out.tfevents.headroom").size();
  };
  EXPECT_EQ(size("run"), size("whole"));
}

TEST(Recorder, FailedHeaderWriteLeavesNoHistory) {
  const Folder folder;
  expect_error(ErrorCode::kFile, "could not be written", [&] {
    const FileSizeLimit limit(20);
    Recorder recorder(folder.path("run"));
  });
  EXPECT_FALSE(std::filesystem::exists(folder.path("run/history.jsonl")));
}

TEST(Recorder, ResumeRecordsChangedSettings) {
  const Folder folder;
  RunInfo info;
  info.settings = {{"steps", "4"}, {"odd", "\xFF"}};
  {
    Recorder recorder(folder.path("run"), info);
    for (int64_t step = 1; step <= 4; ++step) recorder.step(step, 1.0, applied());
    recorder.finish();
  }
  const auto settings = [&] {
    HistoryReader reader(folder.path("run/history.jsonl"));
    reader.read_more();
    return reader.history().settings;
  };
  const auto lines = [&] {
    const std::string text = folder.read("run/history.jsonl");
    return std::count(text.begin(), text.end(), '\n');
  };
  info.resume = true;
  { Recorder(folder.path("run"), info).rewind(4); }
  EXPECT_EQ(lines(), 5) << "unchanged settings add no line";
  info.settings[0].second = "6";
  {
    Recorder recorder(folder.path("run"), info);
    recorder.rewind(3);
    for (int64_t step = 4; step <= 6; ++step) recorder.step(step, 1.0, applied());
  }
  EXPECT_EQ(lines(), 8) << "one line holds the new settings";
  EXPECT_EQ(settings()[0], std::make_pair(std::string("steps"), std::string("6")));
  EXPECT_EQ(settings().size(), 2u);
  info.settings.clear();
  { Recorder recorder(folder.path("run"), info); }
  EXPECT_EQ(settings().size(), 2u) << "settings remain if none are given";
}

TEST(HistoryReader, EveryReadReportsTheDamage) {
  const Folder folder;
  {
    Recorder recorder(folder.path("run"));
    recorder.step(1, 1.0, applied());
  }
  const std::string good = folder.read("run/history.jsonl");
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  folder.write("run/history.jsonl", good + "garbage\n{\"step\":3}\n");
  for (int i = 0; i < 3; ++i) {
    expect_error(ErrorCode::kBadState, "history.jsonl:3:", [&] { reader.read_more(); });
    EXPECT_EQ(reader.bytes(), static_cast<int64_t>(good.size()));
  }
  folder.write("run/history.jsonl", good);
  EXPECT_TRUE(reader.read_more()) << "the damaged lines were removed";
  EXPECT_EQ(reader.history().steps.size(), 1u);
}

TEST(HistoryReader, NamesMayHoldAnyCharacter) {
  const Folder folder;
  const std::string name("a\0b", 3);
  RunInfo info;
  info.settings = {{name, name}};
  { Recorder(folder.path("run"), info).finish({{name, 0.5}}); }
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  EXPECT_EQ(reader.history().settings[0], std::make_pair(name, name));
  EXPECT_EQ(reader.history().results[0], std::make_pair(name, 0.5));
}

TEST(HistoryReader, FollowsARunThatIsRewoundDuringReading) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  for (int64_t step = 1; step <= 9; ++step) recorder.step(step, 1.0, applied());
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  recorder.rewind(4);
  recorder.step(5, 2.0, applied());
  EXPECT_TRUE(reader.read_more());
  EXPECT_EQ(reader.history().steps.size(), 5u);
  recorder.rewind(1);
  for (int64_t step = 2; step <= 30; ++step) recorder.step(step, 3.0, applied());
  EXPECT_TRUE(reader.read_more());
  ASSERT_EQ(reader.history().steps.size(), 30u);
  EXPECT_EQ(reader.history().steps[1].loss, 3.0);
}

TEST(Recorder, FullDiskIsReportedAndLeavesNoPartialLine) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  recorder.step(1, 1.0, applied());
  const auto size = std::filesystem::file_size(folder.path("run/history.jsonl"));
  expect_error(ErrorCode::kFile, "history.jsonl' could not be written", [&] {
    const FileSizeLimit limit(size + 20);
    recorder.step(2, 1.0, applied());
  });
  EXPECT_EQ(std::filesystem::file_size(folder.path("run/history.jsonl")), size);
  recorder.step(2, 1.0, applied());  // works once there is space again
  recorder.finish();
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  EXPECT_EQ(reader.history().steps.size(), 2u);
}

TEST(Recorder, FailedEventWriteAlsoRollsBackTheHistory) {
  const Folder folder;
  RunInfo info;
  info.tensorboard = true;
  Recorder recorder(folder.path("run"), info);
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  const auto layers = measure_layers({{"w", view(weight), view(grad)}});
  Scalars many;  // scalars take more bytes in the event file than in the history
  for (int i = 0; i < 100; ++i) many.emplace_back("s" + std::to_string(i), 0.5);
  for (int64_t step = 1; step <= 20; ++step) recorder.step(step, 1.0, applied(), many);
  const auto size = [&](const char* name) {
    return std::filesystem::file_size(folder.path(std::string("run/") + name));
  };
  const auto history = size(internal::kHistoryFile), events = size(internal::kEventFile);
  ASSERT_GT(events, history + 1000);
  {
    const FileSizeLimit limit(events);
    expect_error(ErrorCode::kFile, "could not be written",
                 [&] { recorder.step(21, 1.0, applied()); });
    expect_error(ErrorCode::kFile, "could not be written",
                 [&] { recorder.layers(21, 1.0, layers); });
  }
  EXPECT_EQ(size(internal::kHistoryFile), history);
  EXPECT_EQ(size(internal::kEventFile), events);
  recorder.step(21, 1.0, applied());  // works once there is space again
  recorder.layers(21, 1.0, layers);
}

TEST(Recorder, MovedFromRecorderThrows) {
  const Folder folder;
  Recorder gone(folder.path("run"));
  const Recorder here = std::move(gone);
  expect_error(ErrorCode::kWrongOrder, "was moved from", [&] { gone.note(1, "x"); });  // NOLINT
}

TEST(Recorder, InvalidArgumentsAreRefused) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  recorder.step(5, 1.0, applied());
  expect_error(ErrorCode::kInvalidArgument, "step 5 after step 5",
               [&] { recorder.step(5, 1.0, applied()); });
  for (const char* name : {"note", "log2", "layers", "end", "culprit", "settings"}) {
    expect_error(ErrorCode::kInvalidArgument, name, [&] {
      recorder.step(6, 1.0, applied(), {{name, 1.0}});
    });
  }
  for (const char* tag : {"train/loss", "scaler/x", "underflow_lost/w", "results/x"}) {
    expect_error(ErrorCode::kInvalidArgument, tag, [&] {
      recorder.step(6, 1.0, applied(), {{tag, 1.0}});
    });
  }
  expect_error(ErrorCode::kInvalidArgument, "two numbers", [&] {
    recorder.step(6, 1.0, applied(), {{"lr", 1.0}, {"train/lr", 1.0}});  // the same tag
  });
  for (const double scale : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    expect_error(ErrorCode::kInvalidArgument, "scale", [&] { recorder.layers(6, scale, {}); });
  }
  expect_error(ErrorCode::kInvalidArgument, "'loss'", [&] {
    recorder.step(6, 1.0, applied(), {{"loss", 1.0}});
  });
  StepReport pending;
  pending.pending = true;
  expect_error(ErrorCode::kInvalidArgument, "pending", [&] { recorder.step(6, 1.0, pending); });
  expect_error(ErrorCode::kInvalidArgument, "how the run ended", [&] { recorder.finish({}, ""); });
  recorder.finish();
  expect_error(ErrorCode::kWrongOrder, "after finish()", [&] { recorder.step(6, 1.0, applied()); });
  expect_error(ErrorCode::kWrongOrder, "after finish()", [&] { recorder.finish(); });
  expect_error(ErrorCode::kFile, "cannot be created", [] { Recorder bad("/proc/no/such"); });
  expect_error(ErrorCode::kFile, "cannot be created",
               [&] { Recorder bad(folder.path("run/history.jsonl")); });
}

TEST(HistoryReader, IncompleteLastLineIsIgnoredAndReported) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  recorder.step(1, 1.0, applied());
  recorder.step(2, 1.0, applied());
  const std::string whole = folder.read("run/history.jsonl");
  const size_t header = whole.find('\n') + 1;
  for (size_t length = header; length < whole.size(); ++length) {
    folder.write("cut/history.jsonl", whole.substr(0, length));
    HistoryReader reader(folder.path("cut/history.jsonl"));
    reader.read_more();
    EXPECT_LE(reader.history().steps.size(), 1u);
    EXPECT_EQ(reader.cut(), whole[length - 1] != '\n') << length;
    write_report(folder.path("cut"));
    const bool reported = folder.read("cut/report.html").find("\"cut\":true") != std::string::npos;
    EXPECT_EQ(reported, reader.cut());
  }
  folder.write("cut/history.jsonl", whole.substr(0, header - 5));
  expect_error(ErrorCode::kBadState, "history.jsonl:1:", [&] { write_report(folder.path("cut")); });
}

TEST(HistoryReader, DamageIsReportedWithItsLineNumber) {
  const Folder folder;
  {
    Recorder recorder(folder.path("run"));
    recorder.layers(1, 1.0, make_layers());
    recorder.step(1, 1.0, applied());
    recorder.step(2, 1.0, applied());
    recorder.finish();
  }
  const std::string whole = folder.read("run/history.jsonl");
  const auto expect_damage = [&](const std::string& from, const std::string& to,
                                 const char* sentence) {
    std::string text = whole;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    folder.write("bad/history.jsonl", text);
    expect_error(ErrorCode::kBadState, sentence, [&] { write_report(folder.path("bad")); });
  };
  expect_damage("headroom-history", "other", "history.jsonl:1:");
  expect_damage("\"version\":1", "\"version\":2", "its version is not 1");
  expect_damage("\"count\":3", "\"count\":-3", "history.jsonl:2:");
  expect_damage("\"histogram\":[2]", "\"histogram\":[9223372036854775807]", "history.jsonl:2:");
  expect_damage("\"from\":0", "\"from\":9223372036854775807", "history.jsonl:2:");
  expect_damage("\"overflow\":false", "\"overflow\":7", "history.jsonl:3:");
  expect_damage("\"scale\":1024.0,\"overflow\"", "\"scale\":-4,\"overflow\"",
                "its \"scale\" is not a positive number");
  expect_damage("\"step\":2", "\"step\":1", "not after the previous one");
  expect_damage("{\"step\":2", "{{", "history.jsonl:4: this line of the history is damaged");
  expect_damage("{\"end\"", "\n{\"end\"", "history.jsonl:5:");
  folder.write("bad/history.jsonl", whole + whole);
  expect_error(ErrorCode::kBadState, "after the end of the run",
               [&] { write_report(folder.path("bad")); });
}

// A hostile line must not exhaust memory or time, so it is refused before it is parsed.
TEST(HistoryReader, LinesBeyondTheLimitsAreRefused) {
  const Folder folder;
  { Recorder recorder(folder.path("run")); }
  const std::string header = folder.read("run/history.jsonl");
  const auto repeated = [](size_t times, const std::string& piece) {
    std::string text;
    for (size_t i = 0; i < times; ++i) text += piece;
    return text;
  };
  const auto expect_line_refused = [&](const std::string& line, const std::string& part) {
    folder.write("run/history.jsonl", header + line);
    HistoryReader reader(folder.path("run/history.jsonl"));
    expect_error(ErrorCode::kBadState,
                 "history.jsonl:2: this line of the history is damaged: it " + part,
                 [&] { reader.read_more(); });
  };
  const std::string note = "{\"step\":1,\"note\":\"";
  expect_line_refused(note + std::string(size_t{64} << 20, 'x'),
                      "is longer than 64 MiB");  // refused before the end of the line is found
  expect_line_refused(note + std::string(size_t{64} << 20, 'x') + "\"}\n", "is longer than 64 MiB");
  expect_line_refused("{\"layers\":[" + repeated(size_t{1} << 21, "[],") + "[]]}\n",
                      "has more than 4194304");
  expect_line_refused("{" + repeated(4097, "\"a\":0,") + "\"b\":0}\n",
                      "has an object of more than 4096");
  expect_line_refused("{\"a\":" + std::string(17, '[') + "\n", "has more than 16 nested");
  folder.write("run/history.jsonl", header + note + repeated(5000, "[{:\\\"") + "\"}\n");
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  EXPECT_EQ(reader.history().notes.size(), 1u) << "brackets inside a string do not count";
}

TEST(Recorder, RefusesToWriteALineThatReadersRefuse) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  Scalars many;
  for (int i = 0; i < 5000; ++i) many.emplace_back("n" + std::to_string(i), 1.0);
  const std::string before = folder.read("run/history.jsonl");
  expect_error(ErrorCode::kInvalidArgument, "more than 4096 entries, which no reader accepts",
               [&] { recorder.step(1, 1.0, applied(), many); });
  EXPECT_EQ(folder.read("run/history.jsonl"), before);
  recorder.step(1, 1.0, applied());
}

TEST(HistoryReader, LayerRecordsAreThinnedEvenly) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  constexpr int64_t kLooks = 5000;
  for (int64_t step = 1; step <= kLooks; ++step) {
    recorder.layers(step, 1.0, make_layers(step == 17 ? 0x1p-30f : 1.0f));
  }
  HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  const auto& looks = reader.history().snapshots;
  EXPECT_LE(looks.size(), 400u);
  EXPECT_GE(looks.size(), 150u);
  EXPECT_EQ(looks.front().step, 1);
  EXPECT_EQ(looks.back().step, kLooks);
  for (size_t i = 2; i + 1 < looks.size(); ++i) {
    EXPECT_EQ(looks[i].step - looks[i - 1].step, looks[1].step - looks[0].step);
  }
  EXPECT_EQ(reader.history().extremes.at("w").lost, 1.0) << "the worst value is kept";
}

}  // namespace
}  // namespace headroom
