// A user's program: skips a step that overflows and applies the next one.
#include <headroom/headroom.h>

#include <cstdio>

namespace hr = headroom;

int main() {
  std::vector<hr::f16> weight(100, hr::f16(1.0f)), grad(100);
  hr::AdamW optimizer({{"w", hr::view(weight), hr::view(grad)}}, {.lr = 0.1});
  hr::GradScaler scaler;
  int applied = 0;
  for (const float value : {4.0f, 0.25f}) {  // the first overflows FP16 at 2^16
    const float scaled = scaler.scale(value);
    for (hr::f16& g : grad) g = hr::f16(scaled);
    applied += scaler.step(optimizer, {.max_norm = 1.0f}).applied;
    scaler.update();
  }
  std::printf("headroom %s on %s: %d of 2 applied, weight %g\n", HEADROOM_VERSION,
              hr::simd_target().c_str(), applied, static_cast<float>(weight[99]));
  return applied == 1 && static_cast<float>(weight[99]) < 1.0f ? 0 : 1;
}
