#ifndef HEADROOM_TESTS_APPLY_SAVED_STATE_H_
#define HEADROOM_TESTS_APPLY_SAVED_STATE_H_

#include <headroom/optimizer.h>

#include <string>
#include <vector>

namespace headroom {

/// A deep copy of an optimizer's state, as in a checkpoint.
struct SavedState {
  explicit SavedState(const OptimizerState& state) : steps(state.steps) {
    for (const NamedTensor& named : state.tensors) {
      const auto* data = static_cast<const float*>(named.tensor.data);
      names.push_back(named.name);
      values.emplace_back(data, data + named.tensor.count);
    }
  }
  OptimizerState state() {
    OptimizerState state;
    state.steps = steps;
    for (size_t i = 0; i < names.size(); ++i) state.tensors.push_back({names[i], view(values[i])});
    return state;
  }
  std::vector<int64_t> steps;
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_APPLY_SAVED_STATE_H_
