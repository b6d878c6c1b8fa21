// Converts state in StateFormat::kHalf and kByte from and to FP32 values on the host, to save and
// load it. Arrays on a CUDA device are copied; all functions wait for it.
#ifndef HEADROOM_SRC_APPLY_COMPACT_STATE_H_
#define HEADROOM_SRC_APPLY_COMPACT_STATE_H_

#include <vector>

#include "apply/fused.h"

namespace headroom::internal {

/// The exact values of the master of a 16-bit weight, and of moment 0 or 1.
std::vector<float> decode_master(const TensorView& weight, const Slot& slot);
std::vector<float> decode_moment(const TensorView& weight, const Slot& slot, size_t moment);

/// Store values rounded to nearest; those that came from decode_...() stay exact. encode_master()
/// also writes the weight. `compact`: the values came from decode_master(); others are in a tie
/// where FP32 masters were rounded to even.
void encode_master(const std::vector<float>& values, const Slot& slot, const TensorView& weight,
                   bool compact);
void encode_moment(const std::vector<float>& values, const Slot& slot, size_t moment,
                   const TensorView& weight);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_COMPACT_STATE_H_
