// What a fused optimizer stores for its parameters: masters, state buffers, step counts, and the
// plan by which its kernels walk them.
#ifndef HEADROOM_SRC_APPLY_FUSED_H_
#define HEADROOM_SRC_APPLY_FUSED_H_

#include <headroom/error.h>
#include <headroom/optimizer.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "apply/cuda.h"
#include "apply/kernels.h"
#include "apply/rules.h"

namespace headroom::internal {

/// One parameter of a fused optimizer.
struct Slot {
  size_t group;
  WeightKind kind;
  StateFormat format;
  StateArrays arrays;  // but for an FP32 weight null until memory is allocated
  int64_t steps;       // applied so far; outdated if device_counts_steps, see fetch_steps()
};

struct FusedState {
  Precision precision;
  StateAllocator allocator;  // null: the library's own memory
  std::vector<RuleSettings> groups;
  std::vector<Slot> slots;  // in the order of Optimizer::parameters()
  size_t allocated = 0;     // the first `allocated` slots have their memory
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
    KernelKind kind;
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

  /// Samples that one thread compares at a time.
  struct SampleJob {
    size_t owner;  // index of the slot
    int64_t first_group;
    int64_t end_group;
  };
  std::vector<SampleJob> sample_jobs;
};

/// The kernel of a slot with gradients of this type.
inline KernelKind kernel_kind(const Slot& slot, Rule rule, DType grad) {
  return {rule, grad, slot.kind, slot.format};
}

/// Whether the FP32 master of a 16-bit weight has to follow what others write to the weight. In the
/// other formats the weight itself is the upper part of the master.
inline bool has_separate_master(const Slot& slot) {
  return has_master(slot.kind) && slot.format == StateFormat::kFull;
}

/// The name of a parameter in saved states and error messages.
std::string name_of(const Parameter& parameter, size_t index);

/// Throws an error of this code unless `steps` is a possible number of steps.
void check_steps(int64_t steps, ErrorCode code);

/// The key for rounding element `index` of a parameter at random.
uint32_t random_key(const Precision& precision, size_t parameter, int64_t steps, uint64_t index);

/// An FP32 array of the size of the weight, on its device.
inline TensorView view_like(const TensorView& weight, float* data) {
  return view(static_cast<void*>(data), DType::kF32, weight.count, weight.device);
}

/// Sets the master to the value of the weight. Does nothing without a master. Enqueues on a CUDA
/// device.
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
void wait_for_devices(const std::vector<Parameter>& parameters);

/// Fetches the step counts from the devices if those on the host may be outdated. Waits.
void fetch_steps(const std::vector<Parameter>& parameters, FusedState* state);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_FUSED_H_
