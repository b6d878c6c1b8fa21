// Zeroed host memory, aligned to cache lines.
#ifndef HEADROOM_SRC_CORE_BUFFER_H_
#define HEADROOM_SRC_CORE_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace headroom::internal {

/// `count` floats rounded up to whole cache lines of 64 bytes. Arrays within a buffer are laid out
/// in these units, so that two threads never write to the same line.
inline size_t whole_lines(int64_t count) { return (static_cast<size_t>(count) + 15) / 16 * 16; }

/// Owns `count` zeroed floats. Throws std::bad_alloc.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  explicit FloatBuffer(size_t count) {
    if (count == 0) return;
    const size_t bytes = whole_lines(static_cast<int64_t>(count)) * sizeof(float);
    data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 0, bytes);
  }

  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_BUFFER_H_
