// The CUDA side of apply/.
#ifndef HEADROOM_SRC_APPLY_CUDA_H_
#define HEADROOM_SRC_APPLY_CUDA_H_

#include <headroom/optimizer.h>

#include <vector>

#include "apply/kernels.h"
#include "core/cuda.h"

namespace headroom::internal {

/// One parameter on a CUDA device, whole.
struct CudaSlot {
  float* master;  // as in ApplySpan
  void* weight;
  void* grad;  // null: it has none, and is left alone
  float* state[2];
  int64_t count;
  int64_t first_piece;
  uint32_t parameter;  // its index in the optimizer
  uint32_t group;
  Rule rule;
  DType grad_type;
  WeightKind kind;
  bool operator==(const CudaSlot&) const = default;
};

/// What a slot's step computes with.
struct CudaNumbers {
  RuleNumbers rule;  // but for the multiplier
  uint64_t random_base;
};

/// Everything about an optimizer that is on the device, as kernels get it.
struct CudaTables {
  const CudaSlot* slots = nullptr;
  const uint32_t* slot_of = nullptr;  // of each piece
  const RuleSettings* groups = nullptr;
  CudaNumbers* numbers = nullptr;  // of each slot, for the step at hand
  int64_t* steps = nullptr;        // of each parameter
  DeviceVerdict* verdict = nullptr;
  uint32_t slot_count = 0;
  uint64_t seed = 0;
};

/// An optimizer's parameters on one device. Once it has tables, the step counts that matter are the
/// ones there.
class CudaApply {
 public:
  /// What the steps from now on work with: fills in first_piece, and enqueues what is not there
  /// already. Takes memory only if there is more of something than before. `parameters` counts all
  /// that the optimizer has.
  void set_slots(int device, std::vector<CudaSlot> slots, size_t parameters, uint64_t seed);
  void set_groups(const std::vector<RuleSettings>& groups);

  /// Step counts of all the optimizer's parameters: enqueues them, or waits for them.
  void set_steps(const std::vector<int64_t>& steps);
  std::vector<int64_t> wait_steps(size_t parameters) const;

  const CudaTables& tables() const { return tables_; }

  /// Enqueues the numbers of a step that is applied for sure.
  void prepare(float multiplier);

  /// Enqueues the step that the tables are prepared for. If it is not to be applied, gradients are
  /// zeroed with `clear_skipped`, and nothing else happens.
  void step(const ApplyJob& job, bool clear_skipped);

 private:
  int device_ = 0;
  CudaTables tables_;
  std::vector<CudaSlot> slots_;       // on the device
  std::vector<RuleSettings> groups_;  // on the device

  // Slots of one rule and types, which are side by side, and their pieces.
  struct Kind {
    Rule rule;
    DType grad_type;
    WeightKind weight;
    int64_t first_piece;
    int64_t pieces;
  };
  std::vector<Kind> kinds_;
  CudaArray<CudaSlot> slot_array_;
  CudaArray<uint32_t> slot_of_array_;
  CudaArray<RuleSettings> group_array_;
  CudaArray<CudaNumbers> number_array_;
  CudaArray<int64_t> step_array_;
  CudaArray<DeviceVerdict> verdict_array_;
};

/// FusedOptimizer::follow_weight() of a weight on a device; enqueues.
void cuda_follow(const TensorView& weight, float* master, bool at_random);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CUDA_H_
