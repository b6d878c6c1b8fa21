// What a fused optimizer stores for its parameters: masters, state buffers, step counts, and the
// plan by which its kernels walk them.
#ifndef HEADROOM_SRC_APPLY_FUSED_H_
#define HEADROOM_SRC_APPLY_FUSED_H_

#include <headroom/optimizer.h>

#include <map>
#include <memory>
#include <vector>

#include "apply/cuda.h"
#include "apply/kernels.h"
#include "apply/rules.h"

namespace headroom::internal {

/// One parameter of a fused optimizer.
struct Slot {
  size_t group;
  WeightKind kind;
  float* master;  // the FP32 weight or the master; null for a 16-bit weight without master, and
                  // for all but FP32 weights until memory is allocated
  float* state[2];
  int64_t steps;  // applied so far; outdated if device_counts_steps, see fetch_steps()
};

struct FusedState {
  Precision precision;
  StateAllocator allocator;  // null: the library's own memory
  std::vector<RuleSettings> groups;
  std::vector<Slot> slots;  // in the order of Optimizer::parameters()
  size_t allocated = 0;     // slots that have their memory: the first ones
  std::vector<std::shared_ptr<void>> memory;

  std::map<int, CudaApply> cuda;     // by device
  bool steps_uploaded = true;        // the devices have the current step counts
  bool device_counts_steps = false;  // verdicts are made on the device, which counts applied steps

  /// Sets the step counts of all slots, here and on the devices.
  void set_steps(const std::vector<int64_t>& steps);

  /// The parameters or their gradients have changed: the plan below is made again.
  void invalidate_plan() { planned = devices_planned = false; }

  /// The plan of the CPU kernels. A job is what one thread does at a time: spans with one kernel.
  struct Job {
    Rule rule;
    DType grad;
    WeightKind kind;
    size_t begin;  // spans [begin, end)
    size_t end;
  };
  bool planned = false;
  bool devices_planned = false;
  size_t bytes = 0;  // that a step reads and writes
  std::vector<Job> jobs;
  std::vector<ApplySpan> spans;
  std::vector<size_t> owners;        // index of the slot of each span
  std::vector<RuleNumbers> numbers;  // of each slot, for the current step
  std::vector<uint8_t> follow;       // of each slot, see ApplySpan

  /// Samples that one thread looks at at a time.
  struct SampleJob {
    size_t owner;  // index of the slot
    int64_t first_group;
    int64_t end_group;
  };
  std::vector<SampleJob> sample_jobs;
};

/// An FP32 array of the size of the weight, on its device.
inline TensorView view_like(const TensorView& weight, float* data) {
  return view(static_cast<void*>(data), DType::kF32, weight.count, weight.device);
}

/// Copies the weight to its master. Does nothing without a master. Enqueues on a CUDA device.
void copy_to_master(const TensorView& weight, const Slot& slot);

/// Allocates masters, as copies of the weights, and state buffers of the slots that have none yet
/// (memory.cc). Throws what the allocator throws, having changed nothing.
void allocate_slots(const std::vector<Parameter>& parameters, FusedState* state);

/// Divides the parameters on the CPU into spans and jobs (plan.cc).
void make_plan(const std::vector<Parameter>& parameters, FusedState* state);

/// Sets `follow` for the step that comes next (follow.cc).
void find_written(const std::vector<Parameter>& parameters, FusedState* state);

/// Sets the master of a weight to it wherever others have written the weight. Enqueues on a CUDA
/// device.
void follow(const TensorView& weight, const Slot& slot, const Precision& precision);

/// Brings the devices' tables up to date: addresses, options, step counts (devices.cc).
void prepare_devices(const std::vector<Parameter>& parameters, FusedState* state);

/// Waits for masters, state or step counts that were written to CUDA devices outside of a step, so
/// that a step on any stream sees them.
void settle_devices(const std::vector<Parameter>& parameters);

/// Fetches the step counts from the devices if those on the host may be outdated. Waits.
void fetch_steps(const std::vector<Parameter>& parameters, FusedState* state);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_FUSED_H_
