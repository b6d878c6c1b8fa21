// The floating-point mode of a careless caller: flush to zero and another rounding, on x86-64 and
// ARM.
#ifndef HEADROOM_TESTS_FLOAT_MODE_H_
#define HEADROOM_TESTS_FLOAT_MODE_H_

#include <cfenv>
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace headroom {

/// The control bits of this thread: rounding and flush to zero.
inline uint64_t float_mode() {
#if defined(__x86_64__)
  return _mm_getcsr() & 0xFFC0u;
#elif defined(__aarch64__)
  return __builtin_aarch64_get_fpcr();
#endif
}

/// During its lifetime this thread flushes subnormal numbers to zero, and rounds as `rounding` says
/// (FE_UPWARD, FE_TOWARDZERO).
class CarelessMode {
 public:
  explicit CarelessMode(int rounding) {
    std::fegetenv(&before_);
    std::fesetround(rounding);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
    __builtin_aarch64_set_fpcr(__builtin_aarch64_get_fpcr() | 1u << 24);
#endif
  }
  ~CarelessMode() { std::fesetenv(&before_); }
  CarelessMode(const CarelessMode&) = delete;
  CarelessMode& operator=(const CarelessMode&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_FLOAT_MODE_H_
