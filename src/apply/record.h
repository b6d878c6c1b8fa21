// The private part of an Optimizer, by which a GradScaler recognises it.
#ifndef HEADROOM_SRC_APPLY_RECORD_H_
#define HEADROOM_SRC_APPLY_RECORD_H_

#include <headroom/optimizer.h>

#include <vector>

namespace headroom::internal {

/// Lives as long as the optimizer does, wherever that is moved to.
struct OptimizerRecord {
  uint64_t id = 0;             // no other optimizer in this process has or had it
  uint64_t revision = 0;       // changes with every change of the parameters
  Optimizer* owner = nullptr;  // where the optimizer is now
  std::vector<Parameter> parameters;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_RECORD_H_
