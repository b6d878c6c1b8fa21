// Counts the magnitudes of a stream of elements of one type, on one thread.
#ifndef HEADROOM_SRC_INSPECT_COUNTER_H_
#define HEADROOM_SRC_INSPECT_COUNTER_H_

#include <headroom/inspect.h>

#include <cstdint>
#include <vector>

#include "inspect/kernels.h"

namespace headroom::internal {

/// Elements go into a table by the upper bits that matter: all 15 of a 16-bit float, exponent and
/// class of the mantissa of a wider one. finish() makes cells of it. Holds up to 512 KiB.
class MagnitudeCounter {
 public:
  explicit MagnitudeCounter(DType dtype);
  /// `count` elements at `data`, of any alignment.
  void add(const void* data, int64_t count);
  /// Adds all counts so far to `out` and resets them.
  void finish(Magnitudes* out);

 private:
  static constexpr size_t kCopies = 4;

  void add16(const char* data, size_t count);
  void add_slots(const char* data, size_t count);
  void add_f32_subnormals(const char* data, size_t count);
  void fold();
  void push(Magnitudes* out, int32_t key, int64_t count) const;
  void finish16(Magnitudes* out);
  void finish_slots(Magnitudes* out);

  DType dtype_;
  size_t slots_;  // of one copy
  // Four copies of the table. An increment of the same slot waits for the previous one, and
  // gradients contain long runs of zeros; with four copies neighbours do not wait for each other.
  std::vector<uint32_t> table_;
  std::vector<int64_t> sums_;
  int64_t in_table_ = 0;  // elements since the last fold()
  int64_t count_ = 0;
  ChunkRange range_;
  std::vector<int64_t> f32_subnormals_;  // by key, from that of 2^-149 on; empty if there are none
};

/// What a cast of elements times `scale` to a format depends on.
BitLimits bit_limits(DType dtype, Format format, double scale);

/// Counts the outcomes of elements at `data`, of any alignment.
void count_fates(const void* data, int64_t count, DType dtype, const BitLimits& limits,
                 Fates* fates);

/// The same for a tensor in host memory, on several threads.
Fates fates_of(const TensorView& tensor, Format format, double scale);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_INSPECT_COUNTER_H_
