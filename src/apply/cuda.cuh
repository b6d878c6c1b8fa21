// For kernels that make the numbers of an optimizer's step on the device.
#ifndef HEADROOM_SRC_APPLY_CUDA_CUH_
#define HEADROOM_SRC_APPLY_CUDA_CUH_

#include "apply/cuda.h"

namespace headroom::internal {

/// Threads of the block that prepares a step. It may have more for other things.
constexpr unsigned kPrepareThreads = 512;

/// The first threads of a block make the numbers of the next step.
__device__ inline void prepare_numbers(const CudaTables& tables) {
  for (uint32_t i = threadIdx.x; i < tables.slot_count; i += kPrepareThreads) {
    const CudaSlot& slot = tables.slots[i];
    if (slot.grad == nullptr) continue;
    const int64_t steps = tables.steps[slot.parameter];
    tables.numbers[i] = {rule_numbers(tables.groups[slot.group], steps, 0.0f),
                         random_base(tables.seed, slot.parameter, steps)};
  }
}

/// They pass on whether it is applied, and count it if it is.
__device__ inline void prepare_verdict(const CudaTables& tables, const DeviceVerdict& verdict) {
  if (threadIdx.x == 0 && tables.verdict != nullptr) *tables.verdict = verdict;
  for (uint32_t i = threadIdx.x; i < tables.slot_count && verdict.apply; i += kPrepareThreads) {
    const CudaSlot& slot = tables.slots[i];
    if (slot.grad != nullptr) ++tables.steps[slot.parameter];
  }
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CUDA_CUH_
