// The tools around a training step: recording and reports, inspection of gradients, checkpoints,
// fault injection. Everything in the library headroom::tools, which links headroom::headroom.
#ifndef HEADROOM_TOOLS_H_
#define HEADROOM_TOOLS_H_

#include <headroom/checkpoint.h>
#include <headroom/inject.h>
#include <headroom/inspect.h>
#include <headroom/layers.h>
#include <headroom/record.h>

#endif  // HEADROOM_TOOLS_H_
