// Counts the magnitudes of a stream of elements of one type, on one thread.
#ifndef HEADROOM_SRC_INSPECT_COUNTER_H_
#define HEADROOM_SRC_INSPECT_COUNTER_H_

#include <headroom/inspect.h>

#include <cstdint>
#include <vector>

#include "inspect/cells.h"
#include "inspect/kernels.h"

namespace headroom::internal {

/// Counts elements by slot (see ClassifyFunction) and converts the slots to cells at the end. Uses
/// 512 KiB of memory or less. Not thread-safe.
class MagnitudeCounter {
 public:
  explicit MagnitudeCounter(DType dtype);
  /// Counts `count` elements at `data`, which may have any alignment.
  void add(const void* data, int64_t count);
  /// Adds all counts to `out` and resets the counter.
  void finish(Magnitudes* out);

 private:
  void add_chunk(const char* data, size_t count);
  void add_f32_subnormals(const char* data, size_t count);
  int64_t count_of(size_t slot) const;
  int32_t key_of(size_t slot) const;
  void flush();

  DType dtype_;
  Layout layout_;
  size_t slots_;  // in each table
  // Four tables that consecutive elements take in turn. Incrementing the same counter again has to
  // wait for the previous store, and gradients have long runs of zeros.
  static constexpr size_t kTables = 4;
  std::vector<uint32_t> tables_;
  int64_t in_tables_ = 0;  // elements counted since the last flush()
  ChunkRange range_;
  std::vector<int64_t> subnormals_;  // of f32, by cell key from kSmallestF32Key on
  Magnitudes total_;                 // flushed counts
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_INSPECT_COUNTER_H_
