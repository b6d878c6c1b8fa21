// The layout of masters and moments in memory.
#ifndef HEADROOM_SRC_APPLY_ARENA_H_
#define HEADROOM_SRC_APPLY_ARENA_H_

#include <cstddef>

namespace headroom::internal {

/// Divides one block of memory into arrays of the same kind: all masters, then all first moments,
/// and so on. Small tensors are thus read as long streams, which the hardware can prefetch. Usage:
/// plan() every parameter, place() the block, then take() in the same order.
class Arena {
 public:
  enum Array { kMaster, kMoment, kSecondMoment, kExponents, kSecondExponents, kArrays };

  void plan(size_t array, size_t bytes) { sizes_[array] += whole_lines(bytes); }

  /// The size of the block; 0 if nothing is needed.
  size_t bytes() const {
    size_t used = 0;
    for (const size_t size : sizes_) used += size == 0 ? 0 : size + kStagger;
    return used;
  }

  void place(void* block) {
    auto* next = static_cast<char*>(block);
    for (size_t i = 0; i < kArrays; ++i) {
      next_[i] = next;
      if (sizes_[i] > 0) next += sizes_[i] + kStagger;
    }
  }

  /// The next `bytes` of an array; null if there are none.
  void* take(size_t array, size_t bytes) {
    if (bytes == 0) return nullptr;
    char* const begin = next_[array];
    next_[array] += whole_lines(bytes);
    return begin;
  }

 private:
  // Whole cache lines, so that two threads never write to the same one.
  static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

  // Bytes between the arrays. Without the gap, arrays whose size is a power of two would compete
  // for the same cache sets when they are read side by side.
  static constexpr size_t kStagger = 1088;

  size_t sizes_[kArrays] = {};
  char* next_[kArrays] = {};
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_ARENA_H_
