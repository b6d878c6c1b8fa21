#include "bench/floor.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/floor.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D32 = hn::CappedTag<uint32_t, 16>;

uint32_t read_loop(const uint32_t* data, size_t words) {
  const D32 d;
  constexpr size_t kN = hn::MaxLanes(D32());
  hn::Vec<D32> sums[8];
  for (auto& sum : sums) sum = hn::Zero(d);
  for (size_t i = 0; i < words; i += 8 * kN) {
#pragma GCC unroll 8
    for (size_t k = 0; k < 8; ++k) sums[k] = hn::Xor(sums[k], hn::LoadU(d, data + i + k * kN));
  }
  for (size_t k = 1; k < 8; ++k) sums[0] = hn::Xor(sums[0], sums[k]);
  return hn::GetLane(sums[0]);
}

using V32 = hn::Vec<D32>;

// Writes `words` words of an array: what is there, or nothing, combined with `mask`.
template <bool kRead>
HWY_INLINE void update_block(V32 mask, uint32_t* array, size_t words) {
  const D32 d;
  constexpr size_t kN = hn::MaxLanes(D32());
  for (size_t i = 0; i < words; i += kN) {
    hn::StoreU(kRead ? hn::Xor(mask, hn::LoadU(d, array + i)) : mask, d, array + i);
  }
}

void update_loop(const void* grad, size_t grad_bytes, const FloorArray* arrays, size_t array_count,
                 size_t count) {
  const D32 d;
  constexpr size_t kN = hn::MaxLanes(D32());
  const size_t grad_words = 64 * grad_bytes / 4;
  for (size_t i = 0; i < count; i += 64) {
    const auto* from = static_cast<const uint32_t*>(grad) + i * grad_bytes / 4;
    auto mask = hn::Zero(d);
    for (size_t k = 0; k < grad_words; k += kN) mask = hn::Xor(mask, hn::LoadU(d, from + k));
    for (size_t k = 0; k < array_count; ++k) {
      const FloorArray& array = arrays[k];
      auto* const to = static_cast<uint32_t*>(array.data) + i * array.bytes / 4;
      const size_t words = 64 * array.bytes / 4;
      array.write_only ? update_block<false>(mask, to, words) : update_block<true>(mask, to, words);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace bench
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom::bench {

HWY_EXPORT(read_loop);
HWY_EXPORT(update_loop);

uint32_t read_floor(const void* data, size_t bytes) {
  return HEADROOM_DISPATCH(read_loop)(static_cast<const uint32_t*>(data), bytes / 4);
}

void update_floor(const void* grad, size_t grad_bytes, const FloorArray* arrays, size_t array_count,
                  size_t count) {
  HEADROOM_DISPATCH(update_loop)(grad, grad_bytes, arrays, array_count, count);
}

}  // namespace headroom::bench
#endif
