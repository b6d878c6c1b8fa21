// Faults of checkpoints.
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "tests/reliability/faults.h"

namespace {

/// Two checkpoints of 1000 numbers in a temporary folder.
struct SavedRun {
  std::filesystem::path folder;
  std::vector<float> w = std::vector<float>(1000, 1.0f);
  std::string newest;

  SavedRun() {
    std::string name = (std::filesystem::temp_directory_path() / "headroom-XXXXXX").string();
    folder = mkdtemp(name.data());
    hr::CheckpointFolder checkpoints(folder.string());
    for (const int64_t step : {1, 2}) save(&checkpoints, step);
    newest = (folder / "checkpoint-000002.safetensors").string();
  }
  ~SavedRun() { std::filesystem::remove_all(folder); }

  void save(hr::CheckpointFolder* checkpoints, int64_t step) {
    w.assign(w.size(), static_cast<float>(step));
    checkpoints->save(step, {{"w", hr::view(w)}}, "");
  }
  // Loads the newest good checkpoint, checks its numbers and returns its step. Sets `why` to the
  // reason for which a newer checkpoint was skipped.
  int64_t load(std::string* why) const {
    std::vector<std::string> left_out;
    const hr::Checkpoint loaded = hr::CheckpointFolder(folder.string()).load(nullptr, &left_out);
    const auto* const data = static_cast<const float*>(loaded.find("w")->tensor.data);
    expect(data[999] == static_cast<float>(loaded.step()), "wrong numbers");
    if (!left_out.empty()) *why = left_out[0].substr(left_out[0].find("' ") + 2);
    return loaded.step();
  }
};

void limit_file_size(rlim_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  setrlimit(RLIMIT_FSIZE, &limit);
}

}  // namespace

Outcome checkpoint_truncated() {
  const SavedRun saved;
  std::filesystem::resize_file(saved.newest, 2000);
  std::string why;
  expect(saved.load(&why) == 1 && !why.empty(), "the damage was not detected");
  return {"reported", "the previous one is used: the newest " + why};
}

Outcome checkpoint_with_a_flipped_bit() {
  const SavedRun saved;
  std::fstream file(saved.newest, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-100, std::ios::end);
  file.put('\1');
  file.close();
  std::string why;
  expect(saved.load(&why) == 1 && !why.empty(), "the damage was not detected");
  return {"reported", "the previous one is used: the newest " + why};
}

Outcome disk_full_while_saving() {
  SavedRun saved;
  signal(SIGXFSZ, SIG_IGN);
  const Outcome outcome = expect_refusal([&] {
    hr::CheckpointFolder checkpoints(saved.folder.string());
    limit_file_size(2000);
    try {
      saved.save(&checkpoints, 3);
    } catch (...) {
      limit_file_size(RLIM_INFINITY);
      throw;
    }
  });
  std::string why;
  expect(saved.load(&why) == 2 && why.empty(), "the previous checkpoint is lost");
  return {"reported", "could not be written" + outcome.what.substr(outcome.what.rfind(':')) +
                          " The previous checkpoints are intact."};
}

Outcome killed_while_saving() {
  SavedRun saved;
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_DFL);  // kills the process during a write
    const rlimit no_core{};
    setrlimit(RLIMIT_CORE, &no_core);
    hr::CheckpointFolder checkpoints(saved.folder.string());
    limit_file_size(2000);
    saved.save(&checkpoints, 3);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFSIGNALED(status), "the process was not killed");
  std::string why;
  expect(saved.load(&why) == 2 && why.empty(), "the previous checkpoint is lost");
  return {"fine", "the previous checkpoints are intact"};
}
