// Memory for the masters and state buffers of a group of parameters.
#ifndef HEADROOM_SRC_APPLY_ARENA_H_
#define HEADROOM_SRC_APPLY_ARENA_H_

#include "apply/fused.h"

namespace headroom::internal {

/// Memory on one device, in three arrays: all masters, then all first state buffers, then all
/// second ones. Small tensors are thus read as long streams, which the hardware can prefetch.
/// Usage: plan() every parameter, allocate() once, then take() in the same order.
class Arena {
 public:
  void plan(int64_t count, bool master, bool states) {
    if (states) states_ += whole_lines(count);
    if (master) masters_ += whole_lines(count);
  }
  /// The memory belongs to `state`.
  void allocate(const Device& device, size_t buffers, FusedState* state) {
    const size_t count = masters_ + buffers * (states_ + kStagger);
    if (device.type == DeviceType::kCUDA) {
      state->cuda_memory.emplace_back(device.index, count * sizeof(float));
      base_ = static_cast<float*>(state->cuda_memory.back().data());
    } else {
      base_ = state->memory.emplace_back(count).data();
    }
    next_[1] = masters_ + kStagger;
    next_[2] = masters_ + states_ + 2 * kStagger;
  }
  /// The next `count` floats of array 0 (masters), 1 or 2 (state buffers).
  float* take(size_t array, int64_t count) {
    if (count == 0) return nullptr;
    float* const begin = base_ + next_[array];
    next_[array] += whole_lines(count);
    return begin;
  }

 private:
  // Floats between the arrays. Without the gap, arrays whose size is a power of two would compete
  // for the same cache sets when they are read side by side.
  static constexpr size_t kStagger = 272;

  size_t masters_ = 0;
  size_t states_ = 0;
  float* base_ = nullptr;
  size_t next_[3] = {0, 0, 0};
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_ARENA_H_
