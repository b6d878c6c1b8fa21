// The state that PyTorch's GradScaler saves, also as JSON. Does not use torch.
#ifndef HEADROOM_LIBTORCH_STATE_DICT_H_
#define HEADROOM_LIBTORCH_STATE_DICT_H_

#include <headroom/export.h>

#include <map>
#include <string>

namespace headroom::libtorch {

/// torch.amp.GradScaler's state_dict(): scale, growth_factor, backoff_factor, growth_interval,
/// _growth_tracker.
using StateDict = std::map<std::string, double>;

/// The JSON that Python's json.dumps(scaler.state_dict()) writes and
/// scaler.load_state_dict(json.loads(text)) reads. state_dict_from_json() throws Error(kBadState)
/// unless the text is an object of numbers.
HEADROOM_API std::string to_json(const StateDict& state);
HEADROOM_API StateDict state_dict_from_json(const std::string& json);

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_STATE_DICT_H_
