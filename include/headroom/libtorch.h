// Headroom for LibTorch: the GradScaler, the autocast guard and the fused optimizers that its C++
// API lacks. Supports LibTorch 1.13 and 2.x and C++17. Link headroom::libtorch.
#ifndef HEADROOM_LIBTORCH_H_
#define HEADROOM_LIBTORCH_H_

#include <headroom/headroom.h>
#include <headroom/libtorch/autocast.h>
#include <headroom/libtorch/grad_scaler.h>
#include <headroom/libtorch/module.h>
#include <headroom/libtorch/ops.h>
#include <headroom/libtorch/optim.h>
#include <headroom/libtorch/watch.h>

#endif  // HEADROOM_LIBTORCH_H_
