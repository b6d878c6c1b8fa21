// What docs/reliability.md promises to threads.
#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "tests/record/folder.h"
#include "tests/support.h"

namespace headroom {
namespace {

std::string train(uint32_t seed) {
  std::vector<f16> weight = random_values<f16>(300000, seed), grad(300000);
  AdamW optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler(DynamicScale{.growth_interval = 2});
  for (uint32_t step = 0; step < 6; ++step) {
    refill(grad, random_values<f16>(grad.size(), seed + step, 100.0));
    if (step == 3) grad[step] = f16(kInf);
    scaler.scale(1.0f);
    scaler.step(optimizer, {.max_norm = 1.0f});
    scaler.update();
  }
  return scaler.save() + fingerprint(measure({view(weight)}));
}

TEST(Concurrency, ThreadsWithTheirOwnObjectsGetTheSameResults) {
  set_num_threads(2);
  const std::string expected = train(1);
  std::vector<std::string> found(4);
  std::vector<std::thread> threads;
  for (std::string& result : found) {
    threads.emplace_back([&result] { result = train(1); });
  }
  for (std::thread& thread : threads) thread.join();
  set_num_threads(0);
  for (const std::string& result : found) EXPECT_EQ(result, expected);
}

TEST(Concurrency, ManyThreadsMayMeasureTheSameGradients) {
  const std::vector<float> grad = random_values<float>(500000, 5);
  const std::string expected = fingerprint(measure({view(grad)}));
  std::vector<std::thread> threads;
  std::vector<std::string> found(4);
  for (std::string& result : found) {
    threads.emplace_back([&] { result = fingerprint(measure({view(grad)})); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& result : found) EXPECT_EQ(result, expected);
}

// Runs `work` in four threads at once, with the number of each.
void in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& thread : threads) thread.join();
}

TEST(Concurrency, ManyThreadsMayAskWhatNoneChanges) {
  const Folder folder;
  const GradScaler scaler(DynamicScale{});
  const std::string saved = scaler.save();
  std::vector<float> grad = random_values<float>(10000, 5);
  Magnitudes magnitudes;
  magnitudes.add(view(grad));
  const double advised = advise(magnitudes).scale;
  const Injector injector(parse_faults("nan:count=2"), 3);
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(1, {{"w", view(grad)}}, saved);
  const Checkpoint checkpoint = checkpoints.load();
  const Checkpoint shared = checkpoint;
  in_threads([&](int i) {
    EXPECT_EQ(scaler.save(), saved);
    EXPECT_EQ(scaler.get_scale(), scaler.state().scale());
    EXPECT_EQ(advise(magnitudes).scale, advised);
    const Checkpoint mine = i % 2 == 0 ? checkpoint : shared;
    EXPECT_EQ(mine.state(), saved);
    EXPECT_EQ(measure({mine.find("w")->tensor}).count, 10000);
    std::vector<f16> own(100);
    EXPECT_EQ(injector.inject(7, {{"own", {}, view(own)}}).size(), 2u);
    EXPECT_EQ(presets().size(), presets().size());
  });
}

TEST(Concurrency, FoldersOfTheirOwnDoNotDisturbOneAnother) {
  const Folder folder;
  in_threads([&](int i) {
    const std::string path = folder.path("run" + std::to_string(i));
    Recorder recorder(path);
    CheckpointFolder checkpoints(path);
    std::vector<float> w(100, static_cast<float>(i));
    for (int64_t step = 1; step <= 5; ++step) {
      StepReport report;
      report.applied = true;
      recorder.step(step, 1.0, report);
      checkpoints.save(step, {{"w", view(w)}}, "");
    }
    recorder.finish();
    write_report(path);
    const Checkpoint loaded = checkpoints.load();
    EXPECT_EQ(static_cast<const float*>(loaded.find("w")->tensor.data)[99], static_cast<float>(i));
  });
}

TEST(Concurrency, TheNumberOfThreadsMayChangeWhileOthersWork) {
  const std::string expected = train(2);
  std::atomic<bool> done = false;
  std::thread changes([&] {
    for (int i = 0; !done; ++i) set_num_threads(1 + i % 3);
  });
  in_threads([&](int) { EXPECT_EQ(train(2), expected); });
  done = true;
  changes.join();
  set_num_threads(0);
}

// Other ranks, and people, read a folder while its owner saves and deletes.
TEST(Concurrency, CheckpointsMayBeReadWhileTheirOwnerSaves) {
  const Folder folder;
  const std::string path = folder.path("run");
  CheckpointFolder owner(path);
  std::vector<float> w(1000);
  const auto save = [&](int64_t step) {
    w.assign(w.size(), static_cast<float>(step));
    owner.save(step, {{"w", view(w)}}, "");
  };
  save(1);
  in_threads([&](int i) {
    if (i == 0) {
      for (int64_t step = 2; step <= 150; ++step) save(step);
      return;
    }
    CheckpointFolder reader(path, FolderUse::kRead);
    for (int64_t last = 0; last < 150;) {
      const Checkpoint loaded = reader.load();
      EXPECT_GE(loaded.step(), last);
      last = loaded.step();
      const auto* const values = static_cast<const float*>(loaded.find("w")->tensor.data);
      EXPECT_EQ(values[999], static_cast<float>(last));
    }
  });
}

TEST(Concurrency, AReportMayBeWrittenWhileTheRunGoesOn) {
  const Folder folder;
  const std::string path = folder.path("run");
  Recorder recorder(path);
  StepReport report;
  report.applied = true;
  recorder.step(1, 1.0, report);
  in_threads([&](int i) {
    for (int64_t step = 2; step <= 30; ++step) {
      if (i == 0) recorder.step(step, 1.0, report);
      if (i != 0) write_report(path, folder.path("report" + std::to_string(i) + ".html"));
    }
  });
}

// Of all that want one folder at once, one gets it.
TEST(Concurrency, OneOfManyGetsAFolder) {
  const Folder folder;
  std::atomic<int> refused = 0;
  std::vector<std::optional<CheckpointFolder>> taken(4);
  in_threads([&](int i) {
    try {
      taken[static_cast<size_t>(i)].emplace(folder.path("run"));
    } catch (const Error&) {
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

}  // namespace
}  // namespace headroom
