// The layout of masters and state buffers in memory.
#ifndef HEADROOM_SRC_APPLY_ARENA_H_
#define HEADROOM_SRC_APPLY_ARENA_H_

#include <cstddef>
#include <cstdint>

#include "core/buffer.h"

namespace headroom::internal {

/// Divides one block of memory into three arrays: all masters, then all first state buffers, then
/// all second ones. Small tensors are thus read as long streams, which the hardware can prefetch.
/// Usage: plan() every parameter, place() the block, then take() in the same order.
class Arena {
 public:
  void plan(int64_t count, bool master, size_t buffers) {
    if (master) sizes_[0] += whole_lines(count);
    for (size_t b = 1; b <= buffers; ++b) sizes_[b] += whole_lines(count);
  }

  /// The size of the block; 0 if nothing is needed.
  size_t floats() const {
    const size_t used = sizes_[0] + sizes_[1] + sizes_[2];
    return used == 0 ? 0 : used + 2 * kStagger;
  }

  void place(float* block) {
    next_[0] = block;
    next_[1] = next_[0] + sizes_[0] + kStagger;
    next_[2] = next_[1] + sizes_[1] + kStagger;
  }

  /// The next `count` floats of array 0 (masters), 1 or 2 (state buffers).
  float* take(size_t array, int64_t count) {
    if (count == 0) return nullptr;
    float* const begin = next_[array];
    next_[array] += whole_lines(count);
    return begin;
  }

 private:
  // Floats between the arrays. Without the gap, arrays whose size is a power of two would compete
  // for the same cache sets when they are read side by side.
  static constexpr size_t kStagger = 272;

  size_t sizes_[3] = {0, 0, 0};
  float* next_[3] = {nullptr, nullptr, nullptr};
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_ARENA_H_
