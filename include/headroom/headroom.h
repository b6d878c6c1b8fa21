// Headroom: loss scaling for mixed-precision training, in C++. This header includes the whole API
// of the library headroom::headroom; <headroom/tools.h> is that of headroom::tools.
#ifndef HEADROOM_HEADROOM_H_
#define HEADROOM_HEADROOM_H_

#include <headroom/accumulate.h>
#include <headroom/agree.h>
#include <headroom/error.h>
#include <headroom/float16.h>
#include <headroom/measure.h>
#include <headroom/optimizer.h>
#include <headroom/policy.h>
#include <headroom/runtime.h>
#include <headroom/scaler.h>
#include <headroom/tensor.h>
#include <headroom/version.h>
#include <headroom/wrappers.h>

#endif  // HEADROOM_HEADROOM_H_
