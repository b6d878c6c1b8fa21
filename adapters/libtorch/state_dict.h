// What a state dict says about a policy and a state. Needs no torch.
#ifndef HEADROOM_ADAPTERS_LIBTORCH_STATE_DICT_H_
#define HEADROOM_ADAPTERS_LIBTORCH_STATE_DICT_H_

#include <headroom/libtorch/state_dict.h>

#include "decide/transition.h"

namespace headroom::libtorch::internal {

using headroom::internal::ScaleRecord;

/// What a scaler with this policy and state becomes when it loads `saved`. Throws Error(kBadState).
ScaleRecord with_state_dict(const ScaleRecord& scaler, const StateDict& saved);
StateDict to_state_dict(const ScaleRecord& scaler);

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_STATE_DICT_H_
