// The CUDA side of apply/.
#ifndef HEADROOM_SRC_APPLY_CUDA_H_
#define HEADROOM_SRC_APPLY_CUDA_H_

#include <vector>

#include "apply/kernels.h"
#include "core/cuda.h"

namespace headroom::internal {

/// One parameter on a CUDA device, whole.
struct CudaSlot {
  float* master;  // as in ApplySpan
  void* weight;
  void* grad;
  float* state[2];
  int64_t count;
  int64_t first_piece;
  uint64_t random_base;  // of the parameter and step, for random rounding
  Rule rule;
  DType grad_type;
  WeightKind kind;
  RuleNumbers numbers;
};

/// The slots of one device, and where they are kept there.
class CudaApply {
 public:
  /// Enqueues the update of all slots on `device`. Their first_piece is filled in.
  void apply(int device, std::vector<CudaSlot>* slots, const ApplyJob& job);

 private:
  std::vector<int64_t> counts_;  // of the slots that the tables were made for
  CudaBuffer table_;
  CudaBuffer slot_of_;  // the slot of each piece
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CUDA_H_
