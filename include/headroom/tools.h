// The whole API of the library headroom::tools: recording, reports and advice, inspection of
// gradients and weights, checkpoints, fault injection. It links headroom::headroom.
#ifndef HEADROOM_TOOLS_H_
#define HEADROOM_TOOLS_H_

#include <headroom/checkpoint.h>
#include <headroom/diagnose.h>
#include <headroom/inject.h>
#include <headroom/inspect.h>
#include <headroom/layers.h>
#include <headroom/ranges.h>
#include <headroom/record.h>
#include <headroom/weights.h>

#endif  // HEADROOM_TOOLS_H_
