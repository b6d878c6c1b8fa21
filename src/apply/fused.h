// What a fused optimizer keeps for its parameters: masters, state buffers, step counts, and the
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
#include "core/buffer.h"

namespace headroom::internal {

/// One parameter of a fused optimizer.
struct Slot {
  size_t group;
  WeightKind kind;
  float* master;  // FP32 weight or master; null for 16-bit weights without
  float* state[2];
  int64_t steps;  // old on a device that counts_alone; see fetch_steps()
};

struct FusedState {
  Precision precision;
  std::vector<RuleSettings> groups;
  std::vector<Slot> slots;  // as Optimizer::parameters()
  std::vector<FloatBuffer> memory;
  std::vector<CudaBuffer> cuda_memory;

  std::map<int, CudaApply> cuda;  // by device
  bool steps_there = true;        // they have all step counts
  bool counts_alone = false;      // the device decides which steps count, maybe in a CUDA graph

  // Made anew when parameters or gradients change.
  struct Job {
    Rule rule;
    DType grad;
    WeightKind kind;
    size_t begin;  // spans [begin, end)
    size_t end;
  };
  /// Step counts of all slots, here and on the devices.
  void set_steps(const std::vector<int64_t>& steps);

  bool planned = false;
  bool devices_planned = false;
  size_t bytes = 0;
  std::vector<Job> jobs;
  std::vector<ApplySpan> spans;
  std::vector<size_t> owners;        // the slot of each span
  std::vector<RuleNumbers> numbers;  // of each slot, for the step at hand
};

/// Cuts the parameters into spans and jobs.
void make_plan(const std::vector<Parameter>& parameters, FusedState* state);

/// Brings the devices' tables up to date: memory, options, step counts.
void prepare_devices(const std::vector<Parameter>& parameters, FusedState* state);

/// Waits for masters, state or step counts that were written to CUDA devices outside of a step, so
/// that a step on any stream finds them.
void settle_devices(const std::vector<Parameter>& parameters);

/// Fetches the step counts from the devices if those here may be old.
void fetch_steps(const std::vector<Parameter>& parameters, FusedState* state);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_FUSED_H_
