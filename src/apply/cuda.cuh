// Prepares an optimizer's step on the device, as part of the kernel that decides on it. Both
// functions are called by the first kPrepareThreads threads of a single block.
#ifndef HEADROOM_SRC_APPLY_CUDA_CUH_
#define HEADROOM_SRC_APPLY_CUDA_CUH_

#include "apply/cuda.h"

namespace headroom::internal {

/// Threads that share this work. The block may have more threads for other work.
constexpr unsigned kPrepareThreads = 512;

/// Computes the numbers of the next step of each slot.
__device__ inline void prepare_numbers(const CudaTables& tables) {
  for (uint32_t i = threadIdx.x; i < tables.slot_count; i += kPrepareThreads) {
    const CudaSlot& slot = tables.slots[i];
    if (slot.grad == nullptr) continue;
    const int64_t steps = tables.steps[slot.parameter];
    tables.numbers[i] = {rule_numbers(tables.groups[slot.group], steps, 0.0f),
                         random_base(tables.seed, slot.parameter, steps), false};
  }
}

/// Publishes the verdict for the step kernels and, if the step is applied, counts it. Must not run
/// before prepare_numbers() has read the step counts: synchronise the block in between.
__device__ inline void prepare_verdict(const CudaTables& tables, const DeviceVerdict& verdict) {
  if (threadIdx.x == 0 && tables.verdict != nullptr) *tables.verdict = verdict;
  for (uint32_t i = threadIdx.x; i < tables.slot_count && verdict.apply; i += kPrepareThreads) {
    const CudaSlot& slot = tables.slots[i];
    if (slot.grad != nullptr) ++tables.steps[slot.parameter];
  }
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CUDA_CUH_
