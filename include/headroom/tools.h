// The whole API of the library headroom::tools: recording and reports, inspection of gradients,
// checkpoints, fault injection. It links headroom::headroom.
#ifndef HEADROOM_TOOLS_H_
#define HEADROOM_TOOLS_H_

#include <headroom/checkpoint.h>
#include <headroom/inject.h>
#include <headroom/inspect.h>
#include <headroom/layers.h>
#include <headroom/ranges.h>
#include <headroom/record.h>

#endif  // HEADROOM_TOOLS_H_
