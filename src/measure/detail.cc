// Counts elements by magnitude. Used for occasional inspection, so scalar code is fast enough.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "measure/scalar.h"

namespace headroom::internal {

template <typename T>
void add_detail(const T* p, size_t count, GradDetail* detail) {
  constexpr int kMin = GradDetail::kMinExponent;
  for (size_t i = 0; i < count; ++i) {
    const T x = element(p + i);
    const auto magnitude = magnitude_of(x);
    if (magnitude >= Element<T>::kInf) continue;
    if (magnitude == 0) {
      ++detail->zeros;
      continue;
    }
    detail->subnormals += magnitude < Element<T>::kMinNormal;
    // floor(log2(|x|)), from the exponent field of the double. Every f16, bf16 and float is a
    // normal double. f64 subnormals give -1023, which is clamped to the first bin anyway.
    const int exponent = static_cast<int>(std::bit_cast<uint64_t>(widen(x)) >> 52 & 0x7FF) - 1023;
    ++detail->histogram[static_cast<size_t>(std::clamp(exponent - kMin, 0, GradDetail::kBins - 1))];
  }
}

template void add_detail<f16>(const f16*, size_t, GradDetail*);
template void add_detail<bf16>(const bf16*, size_t, GradDetail*);
template void add_detail<float>(const float*, size_t, GradDetail*);
template void add_detail<double>(const double*, size_t, GradDetail*);

}  // namespace headroom::internal
