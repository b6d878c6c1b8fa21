// The element types behind DType: their bit patterns, and dispatch from a DType to a C++ type.
#ifndef HEADROOM_SRC_CORE_ELEMENT_H_
#define HEADROOM_SRC_CORE_ELEMENT_H_

#include <headroom/tensor.h>

#include <bit>
#include <cstdint>
#include <limits>

namespace headroom::internal {

/// Bit patterns of the smallest normal number and of inf.
template <typename T>
struct Element;
template <>
struct Element<f16> {
  using Bits = uint16_t;
  static constexpr DType kDType = DType::kF16;
  static constexpr Bits kMinNormal = 0x0400, kInf = 0x7C00;
};
template <>
struct Element<bf16> {
  using Bits = uint16_t;
  static constexpr DType kDType = DType::kBF16;
  static constexpr Bits kMinNormal = 0x0080, kInf = 0x7F80;
};
template <>
struct Element<float> {
  using Bits = uint32_t;
  static constexpr DType kDType = DType::kF32;
  static constexpr Bits kMinNormal = 0x00800000, kInf = 0x7F800000;
};
template <>
struct Element<double> {
  using Bits = uint64_t;
  static constexpr DType kDType = DType::kF64;
  static constexpr Bits kMinNormal = 0x0010000000000000, kInf = 0x7FF0000000000000;
};

/// The largest finite f16, and the smallest magnitude that rounds to inf in f16: halfway to 2^16.
inline constexpr double kLargestF16 = 65504.0;
inline constexpr double kRoundsToInfF16 = 65520.0;

/// The bits of `x` without the sign. As integers they are ordered like the magnitudes:
/// 0 < subnormal < kMinNormal <= normal < kInf < NaN. Comparing integers instead of calling
/// isfinite() also keeps -ffast-math from optimising the check away.
template <typename T>
HEADROOM_HOST_DEVICE inline typename Element<T>::Bits magnitude_of(T x) {
  using Bits = typename Element<T>::Bits;
  return static_cast<Bits>(std::bit_cast<Bits>(x) & std::numeric_limits<Bits>::max() >> 1);
}

/// Returns call(T{}), where T is the one of `First`, `Rest`... that `dtype` stands for; the last
/// one if `dtype` is none of the others.
#ifdef __CUDACC__
#pragma nv_exec_check_disable  // `call` may be a host lambda or a device lambda
#endif
template <typename First, typename... Rest, typename Call>
HEADROOM_HOST_DEVICE inline auto with_type(DType dtype, const Call& call) {
  if constexpr (sizeof...(Rest) == 0) {
    return call(First{});
  } else {
    if (dtype == Element<First>::kDType) return call(First{});
    return with_type<Rest...>(dtype, call);
  }
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_ELEMENT_H_
