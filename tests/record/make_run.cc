// make_run FOLDER STEPS DELAY_MS: writes a run with a predictable history, for tests of the
// program. Every tenth step is skipped; layers are recorded in every fifth.
#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace hr = headroom;

int main(int argc, char** argv) try {
  if (argc != 4) return 2;
  std::vector<float> grad = {0x1p-30f, 0x1p-20f, 1.0f, 1.5f, 0.0f}, evil = {1024.0f};
  const std::vector<hr::Parameter> parameters = {
      {"layer.weight", {}, hr::view(grad)},
      {"</script><img src=x onerror=alert(1)>\"'\xE2\x82\xAC", {}, hr::view(evil)}};
  hr::RunInfo info;
  info.tensorboard = true;
  info.settings = {{"optimizer", "adam, \xE2\x82\xAC"}, {"rate", "0.25"}};
  hr::Recorder recorder(argv[1], info);
  for (int step = 1; step <= std::atoi(argv[2]); ++step) {
    if (step % 5 == 0) recorder.layers(step, 8.0, hr::measure_layers(parameters));
    hr::StepReport report;
    report.scale = 8.0f;
    report.grad_norm = 0.5;
    report.applied = step % 10 != 0;
    if (!report.applied) report.culprit = parameters[1].name + ": 1 inf, 0 nan";
    recorder.step(step, 1.0 / step, report, {{"lr", 0.25}});
    std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(argv[3])));
  }
  recorder.finish({{"accuracy", 0.75}});
  return 0;
} catch (const hr::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
