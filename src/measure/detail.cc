#include <algorithm>
#include <bit>
#include <cstdint>

#include "measure/careful.h"

namespace headroom::internal {
namespace {

constexpr int kMin = GradDetail::kMinExponent;
constexpr int kMax = GradDetail::kMaxExponent;

bool subnormal(f16 x) { return (x.bits & 0x7C00) == 0 && (x.bits & 0x3FF) != 0; }
bool subnormal(bf16 x) { return (x.bits & 0x7F80) == 0 && (x.bits & 0x7F) != 0; }
bool subnormal(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
  return bits != 0 && bits < 0x00800000u;
}
bool subnormal(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x) & 0x7FFFFFFFFFFFFFFFu;
  return bits != 0 && bits < 0x0010000000000000u;
}

// floor(log2(|x|)) of a finite x other than 0. Every f16, bf16 and float is a normal double.
int exponent(double x) {
  const int biased = static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 0x7FF);
  return biased - 1023;  // f64 subnormals come out as -1023: below the histogram anyway
}

}  // namespace

template <typename T>
void add_detail(const T* p, size_t count, GradDetail* detail) {
  for (size_t i = 0; i < count; ++i) {
    const T x = element(p + i);
    if (!finite_bits(x)) continue;
    const double wide = widen(x);
    if (wide == 0.0) {
      ++detail->zeros;
      continue;
    }
    detail->subnormals += subnormal(x);
    ++detail->histogram[static_cast<size_t>(std::clamp(exponent(wide), kMin, kMax) - kMin)];
  }
}

template void add_detail<f16>(const f16*, size_t, GradDetail*);
template void add_detail<bf16>(const bf16*, size_t, GradDetail*);
template void add_detail<float>(const float*, size_t, GradDetail*);
template void add_detail<double>(const double*, size_t, GradDetail*);

}  // namespace headroom::internal
