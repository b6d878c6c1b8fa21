// The private part of an Optimizer, by which a GradScaler recognises it.
#ifndef HEADROOM_SRC_APPLY_RECORD_H_
#define HEADROOM_SRC_APPLY_RECORD_H_

#include <headroom/optimizer.h>

#include <vector>

namespace headroom::internal {

/// Moves along with the optimizer; a scaler's weak pointer expires when the optimizer is destroyed.
struct OptimizerRecord {
  uint64_t id = 0;             // unique in this process, never reused
  uint64_t revision = 0;       // incremented with every change of the parameters
  Optimizer* owner = nullptr;  // the current address of the optimizer
  std::vector<Parameter> parameters;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_RECORD_H_
