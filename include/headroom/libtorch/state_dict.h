// A scaler's state in the form that PyTorch saves, and as JSON. Needs no torch.
#ifndef HEADROOM_LIBTORCH_STATE_DICT_H_
#define HEADROOM_LIBTORCH_STATE_DICT_H_

#include <headroom/export.h>

#include <map>
#include <string>

namespace headroom::libtorch {

/// torch.amp.GradScaler's state_dict(): scale, growth_factor, backoff_factor, growth_interval,
/// _growth_tracker. As JSON it is what Python's json.dumps(scaler.state_dict()) writes and
/// scaler.load_state_dict(json.loads(text)) reads.
using StateDict = std::map<std::string, double>;

HEADROOM_API std::string to_json(const StateDict& state);
HEADROOM_API StateDict state_dict_from_json(const std::string& json);

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_STATE_DICT_H_
