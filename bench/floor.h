// The floors of the benchmarks: loops that only move the same bytes as the kernels, on the same
// SIMD target and in the same access pattern.
#ifndef HEADROOM_BENCH_FLOOR_H_
#define HEADROOM_BENCH_FLOOR_H_

#include <cstddef>
#include <cstdint>

namespace headroom::bench {

/// Reads `bytes` bytes (a multiple of 512) with plain vector loads. Returns their XOR, so that the
/// compiler cannot remove the loop.
uint32_t read_floor(const void* data, size_t bytes);

/// An array that an update writes, and reads first unless `write_only`.
struct FloorArray {
  void* data;
  size_t bytes;  // of an element
  bool write_only = false;
};

/// Reads and writes what an optimizer's step does to `count` elements (a multiple of 64), 64 at a
/// time of each array, with one XOR per vector as arithmetic.
void update_floor(const void* grad, size_t grad_bytes, const FloorArray* arrays, size_t array_count,
                  size_t count);

}  // namespace headroom::bench

#endif  // HEADROOM_BENCH_FLOOR_H_
