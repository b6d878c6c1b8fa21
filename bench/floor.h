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

/// The arrays of an update: the gradient is read, the others are read and written, and `weight16`
/// (may be null) is written only. `grad_bytes` is 2 or 4.
struct UpdateArrays {
  const void* grad;
  size_t grad_bytes;
  float* master;
  float* m;  // may be null
  float* v;  // may be null
  uint16_t* weight16;
  size_t count;  // a multiple of 64
};

/// Reads and writes what an optimizer's step does, with one XOR per element as arithmetic.
void update_floor(const UpdateArrays& arrays);

}  // namespace headroom::bench

#endif  // HEADROOM_BENCH_FLOOR_H_
