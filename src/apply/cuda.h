// The CUDA implementation of apply/. Everything enqueues on the current stream and returns, unless
// its name says that it waits.
#ifndef HEADROOM_SRC_APPLY_CUDA_H_
#define HEADROOM_SRC_APPLY_CUDA_H_

#include <headroom/optimizer.h>

#include <vector>

#include "apply/kernels.h"
#include "core/cuda.h"

namespace headroom::internal {

/// One parameter, as kernels see it.
struct CudaSlot {
  StateArrays state;
  void* weight;  // as in ApplySpan
  void* grad;    // null: the parameter has no gradient and is not updated
  int64_t count;
  int64_t first_piece;  // index of its first piece among all pieces; set by set_slots()
  uint32_t parameter;   // index in the optimizer
  uint32_t group;
  KernelKind kind;
  bool operator==(const CudaSlot&) const = default;
};

/// The numbers of one slot in the current step.
struct CudaNumbers {
  RuleNumbers rule;  // without the multiplier, which is part of the verdict
  uint64_t random_base;
  uint32_t random_key;  // of the elements below 2^32, see random_key_at()
  bool follow;          // others have written sampled weights: masters have to follow
};

/// Pointers to everything that the device stores about an optimizer; a kernel argument.
struct CudaTables {
  const CudaSlot* slots = nullptr;
  const uint32_t* slot_of = nullptr;  // index of the slot of each piece
  const RuleSettings* groups = nullptr;
  CudaNumbers* numbers = nullptr;    // of each slot
  uint64_t* sample_bases = nullptr;  // of each slot: where the next step looks for written weights
  int64_t* steps = nullptr;          // of each parameter
  DeviceVerdict* verdict = nullptr;
  uint32_t slot_count = 0;
  uint64_t seed = 0;
};

/// An optimizer's parameters on one device.
class CudaApply {
 public:
  /// Set what later steps work with. Uploads only what has changed, and allocates only if a table
  /// has to grow. `parameters`: the number of all parameters of the optimizer.
  void set_slots(int device, std::vector<CudaSlot> slots, size_t parameters, uint64_t seed);
  void set_groups(const std::vector<RuleSettings>& groups);

  /// Step counts of all parameters of the optimizer.
  void set_steps(const std::vector<int64_t>& steps);
  std::vector<int64_t> wait_steps(size_t parameters) const;

  CudaTables tables() const {
    return {.slots = slot_array_.data(),
            .slot_of = slot_of_array_.data(),
            .groups = group_array_.data(),
            .numbers = number_array_.data(),
            .sample_bases = sample_base_array_.data(),
            .steps = step_array_.data(),
            .verdict = verdict_array_.data(),
            .slot_count = static_cast<uint32_t>(slots_.size()),
            .seed = seed_};
  }

  /// Prepares the tables for a step that is applied unconditionally. A scaler on the device does
  /// this in its own kernel, see prepare_numbers() in cuda.cuh.
  void prepare(float multiplier);

  /// Runs the step that the tables are prepared for. If the verdict there is to skip, it only
  /// zeroes the gradients, and those only with `clear_skipped`.
  void step(const ApplyJob& job, bool clear_skipped);

 private:
  int device_ = 0;
  uint64_t seed_ = 0;
  std::vector<CudaSlot> slots_;  // copies of what the device has
  std::vector<RuleSettings> groups_;

  // Adjacent slots that use the same kernel.
  struct Launch {
    KernelKind kind;
    int64_t first_piece;
    int64_t pieces;
  };
  std::vector<Launch> launches_;
  CudaArray<CudaSlot> slot_array_;
  CudaArray<uint32_t> slot_of_array_;
  CudaArray<RuleSettings> group_array_;
  CudaArray<CudaNumbers> number_array_;
  CudaArray<uint64_t> sample_base_array_;
  CudaArray<int64_t> step_array_;
  CudaArray<DeviceVerdict> verdict_array_;
};

/// FusedOptimizer::follow_weight() for a weight on a device.
void cuda_follow(const TensorView& weight, float* master, bool stochastic);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CUDA_H_
