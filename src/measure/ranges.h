// The arithmetic of RangeStats, for the host and for CUDA kernels.
#ifndef HEADROOM_SRC_MEASURE_RANGES_H_
#define HEADROOM_SRC_MEASURE_RANGES_H_

#include <headroom/ranges.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/element.h"

namespace headroom::internal {

// The same bytes on the host and on devices.
static_assert(std::is_trivially_copyable_v<RangeStats>);

/// The smallest magnitudes of T, as bits, that do not become zero in FP16, that are normal there,
/// and that become inf. 2^-25 itself becomes zero, 65520 becomes inf.
template <typename T>
struct Fp16Limits;
template <>
struct Fp16Limits<f16> {
  static constexpr uint16_t kKept = 1, kNormal = 0x0400, kOverflow = 0x7C00;
};
template <>
struct Fp16Limits<bf16> {  // 65520 is no bf16: 65536 is the first one that overflows
  static constexpr uint16_t kKept = ((127 - 25) << 7) + 1, kNormal = (127 - 14) << 7;
  static constexpr uint16_t kOverflow = (127 + 16) << 7;
};
template <>
struct Fp16Limits<float> {
  static constexpr uint32_t kKept = ((127 - 25) << 23) + 1, kNormal = (127 - 14) << 23;
  static constexpr uint32_t kOverflow = 0x477FF000;
};
template <>
struct Fp16Limits<double> {
  static constexpr uint64_t kKept = (uint64_t{1023 - 25} << 52) + 1;
  static constexpr uint64_t kNormal = uint64_t{1023 - 14} << 52;
  static constexpr uint64_t kOverflow = 0x40EFFE0000000000;
};

/// Numbers of elements that reach each limit, inf and NaN included.
struct Reached {
  uint64_t nonzero = 0;
  uint64_t kept = 0;
  uint64_t normal = 0;
  uint64_t overflow = 0;
};

/// Fills the fields of RangeStats that follow from `reached`; inf and NaN must be counted already.
HEADROOM_HOST_DEVICE inline void set_zones(int64_t count, const Reached& reached,
                                           RangeStats* stats) {
  stats->count = count;
  stats->zeros = count - static_cast<int64_t>(reached.nonzero);
  stats->flushed = static_cast<int64_t>(reached.nonzero - reached.kept);
  stats->subnormal = static_cast<int64_t>(reached.kept - reached.normal);
  stats->overflow = static_cast<int64_t>(reached.overflow) - stats->positive_inf -
                    stats->negative_inf - stats->nan;
}

/// Access for the bindings in this repository.
struct HEADROOM_API RangesAccess {
  /// RangeTable::measure() of a framework's tensor, on the current stream, without a check of the
  /// memory's location.
  static int64_t measure(RangeTable& table, const TensorView& tensor) {
    return measure_all(table, {tensor})[0];
  }
  /// The same of many tensors, by few kernels.
  static std::vector<int64_t> measure_all(RangeTable& table,
                                          const std::vector<TensorView>& tensors);
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_RANGES_H_
