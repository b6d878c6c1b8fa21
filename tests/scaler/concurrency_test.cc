// The thread safety that docs/reliability.md guarantees.
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

// Calls `work` with the numbers 0 to 3 in four concurrent threads.
void run_in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& thread : threads) thread.join();
}

TEST(Concurrency, ThreadsWithSeparateObjectsGetTheSameResults) {
  set_num_threads(2);
  const std::string expected = train(1);
  run_in_threads([&](int) { EXPECT_EQ(train(1), expected); });
  set_num_threads(0);
}

TEST(Concurrency, ThreadsCanMeasureTheSameGradients) {
  const std::vector<float> grad = random_values<float>(500000, 5);
  const std::string expected = fingerprint(measure({view(grad)}));
  run_in_threads([&](int) { EXPECT_EQ(fingerprint(measure({view(grad)})), expected); });
}

TEST(Concurrency, ConstCallsAreThreadSafe) {
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
  run_in_threads([&](int i) {
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

TEST(Concurrency, SeparateFoldersAreIndependent) {
  const Folder folder;
  run_in_threads([&](int i) {
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

TEST(Concurrency, ThreadCountCanChangeDuringTraining) {
  const std::string expected = train(2);
  std::atomic<bool> done = false;
  std::thread changer([&] {
    for (int i = 0; !done; ++i) set_num_threads(1 + i % 3);
  });
  run_in_threads([&](int) { EXPECT_EQ(train(2), expected); });
  done = true;
  changer.join();
  set_num_threads(0);
}

// Other ranks and users read a folder while its owner saves and deletes checkpoints.
TEST(Concurrency, CheckpointsCanBeReadWhileTheOwnerSaves) {
  const Folder folder;
  const std::string path = folder.path("run");
  CheckpointFolder owner(path);
  std::vector<float> w(1000);
  const auto save = [&](int64_t step) {
    w.assign(w.size(), static_cast<float>(step));
    owner.save(step, {{"w", view(w)}}, "");
  };
  save(1);
  run_in_threads([&](int i) {
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

TEST(Concurrency, ReportsCanBeWrittenDuringTheRun) {
  const Folder folder;
  const std::string path = folder.path("run");
  Recorder recorder(path);
  StepReport report;
  report.applied = true;
  recorder.step(1, 1.0, report);
  run_in_threads([&](int i) {
    for (int64_t step = 2; step <= 30; ++step) {
      if (i == 0) recorder.step(step, 1.0, report);
      if (i != 0) write_report(path, folder.path("report" + std::to_string(i) + ".html"));
    }
  });
}

TEST(Concurrency, OnlyOneThreadAcquiresAFolder) {
  const Folder folder;
  std::atomic<int> refused = 0;
  std::vector<std::optional<CheckpointFolder>> acquired(4);
  run_in_threads([&](int i) {
    try {
      acquired[static_cast<size_t>(i)].emplace(folder.path("run"));
    } catch (const Error&) {
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

}  // namespace
}  // namespace headroom
