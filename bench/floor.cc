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
using D16 = hn::Rebind<uint16_t, D32>;

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

template <bool kGrad16, bool kWeight16, bool kMoments>
void update_loop(const UpdateArrays& arrays) {
  const D32 d;
  const D16 d16;
  constexpr size_t kN = hn::MaxLanes(D32());
  const auto* grad16 = static_cast<const uint16_t*>(arrays.grad);
  const auto* grad32 = static_cast<const uint32_t*>(arrays.grad);
  auto* w = reinterpret_cast<uint32_t*>(arrays.master);
  auto* m = reinterpret_cast<uint32_t*>(arrays.m);
  auto* v = reinterpret_cast<uint32_t*>(arrays.v);
  for (size_t i = 0; i < arrays.count; i += kN) {
    hn::Vec<D32> g;
    if constexpr (kGrad16) {
      g = hn::PromoteTo(d, hn::LoadU(d16, grad16 + i));
    } else {
      g = hn::LoadU(d, grad32 + i);
    }
    const auto weight = hn::Xor(hn::LoadU(d, w + i), g);
    hn::StoreU(weight, d, w + i);
    if constexpr (kMoments) {
      hn::StoreU(hn::Xor(hn::LoadU(d, m + i), g), d, m + i);
      hn::StoreU(hn::Xor(hn::LoadU(d, v + i), g), d, v + i);
    }
    if constexpr (kWeight16) {
      hn::StoreU(hn::TruncateTo(d16, weight), d16, arrays.weight16 + i);
    }
  }
}

void update_any(const UpdateArrays& arrays) {
  const bool grad16 = arrays.grad_bytes == 2;
  const bool weight16 = arrays.weight16 != nullptr;
  if (arrays.m == nullptr) {
    if (grad16 && weight16) return update_loop<true, true, false>(arrays);
    if (grad16) return update_loop<true, false, false>(arrays);
    return weight16 ? update_loop<false, true, false>(arrays)
                    : update_loop<false, false, false>(arrays);
  }
  if (grad16 && weight16) return update_loop<true, true, true>(arrays);
  if (grad16) return update_loop<true, false, true>(arrays);
  return weight16 ? update_loop<false, true, true>(arrays)
                  : update_loop<false, false, true>(arrays);
}

}  // namespace HWY_NAMESPACE
}  // namespace bench
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom::bench {

HWY_EXPORT(read_loop);
HWY_EXPORT(update_any);

uint32_t read_floor(const void* data, size_t bytes) {
  return HEADROOM_DISPATCH(read_loop)(static_cast<const uint32_t*>(data), bytes / 4);
}

void update_floor(const UpdateArrays& arrays) { HEADROOM_DISPATCH(update_any)(arrays); }

}  // namespace headroom::bench
#endif
