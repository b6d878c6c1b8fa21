// One step with the installed package: an overflow is skipped, and named.
#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace hr = headroom;

int main() {
  std::vector<hr::f16> weight(4), grad(4);
  std::vector<hr::Parameter> parameters = {{"weight", hr::view(weight), hr::view(grad)}};
  hr::AdamW optimizer(parameters);
  hr::GradScaler scaler(hr::preset("headroom"));
  scaler.scale(1.0f);
  grad[2] = hr::f16(INFINITY);
  const hr::StepReport report = scaler.step(optimizer);
  scaler.update();
  std::puts(report.to_string().c_str());  // skipped at scale 65536: weight: 1 inf, 0 nan
  return report.applied || hr::scale_bounds(hr::measure_layers(parameters)).first_to_overflow > 0;
}
