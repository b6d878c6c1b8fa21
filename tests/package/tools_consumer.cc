// A user's program with the tools: injects a fault, records the skipped step, counts the gradients
// by magnitude and saves a checkpoint.
#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <cstdio>
#include <string>
#include <vector>

namespace hr = headroom;

int main(int, char** argv) {
  const std::string folder = argv[1];
  std::vector<hr::f16> weight(100, hr::f16(1.0f)), grad(100, hr::f16(0.25f));
  hr::AdamW optimizer({{"w", hr::view(weight), hr::view(grad)}});
  hr::GradScaler scaler;

  hr::Magnitudes magnitudes;
  magnitudes.add(hr::view(grad));
  const hr::Injector injector(hr::parse_faults("nan"));
  const size_t injected = injector.inject(0, optimizer.parameters()).size();

  hr::Recorder recorder(folder);
  scaler.scale(1.0f);
  const hr::StepReport report = scaler.step(optimizer);
  scaler.update();
  recorder.step(0, 0.5, report);
  recorder.finish();
  hr::write_report(folder);

  hr::CheckpointFolder checkpoints(folder);
  checkpoints.save(0, {{"w", hr::view(weight)}}, scaler.save());
  const bool same = checkpoints.load().state() == scaler.save();
  std::printf("tools %s: %zu injected, %s, largest %g\n", HEADROOM_VERSION, injected,
              report.applied ? "applied" : "skipped", magnitudes.largest());
  return injected == 1 && !report.applied && magnitudes.largest() == 0.25 && same ? 0 : 1;
}
