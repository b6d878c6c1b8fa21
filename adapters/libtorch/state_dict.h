// Conversion between PyTorch's state dict and the core's policy and state. Does not use torch.
#ifndef HEADROOM_ADAPTERS_LIBTORCH_STATE_DICT_H_
#define HEADROOM_ADAPTERS_LIBTORCH_STATE_DICT_H_

#include <headroom/libtorch/state_dict.h>

#include "decide/transition.h"

namespace headroom::libtorch::internal {

using headroom::internal::ScaleRecord;

/// The record of `scaler` after loading `saved`. Throws Error(kBadState) if a number is missing or
/// out of range.
ScaleRecord with_state_dict(const ScaleRecord& scaler, const StateDict& saved);
StateDict to_state_dict(const ScaleRecord& scaler);

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_STATE_DICT_H_
