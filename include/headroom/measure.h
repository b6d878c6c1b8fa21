// measure: one read of all gradients tells everything the later stations need.
#ifndef HEADROOM_MEASURE_H_
#define HEADROOM_MEASURE_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// A sum of squares that neither overflows nor underflows: value x 2^(2 x exponent), where the
/// exponent is 0 unless f64 elements beyond 2^450 or below 2^-450 made another one necessary.
struct SumOfSquares {
  double value = 0.0;
  int exponent = 0;

  HEADROOM_HOST_DEVICE void add(const SumOfSquares& other) {
    if (other.value == 0.0) return;
    if (value == 0.0 || exponent == other.exponent) {
      value += other.value;
      exponent = other.exponent;
      return;
    }
    // The smaller unit is converted to the larger one; what that loses is far below rounding.
    const int larger = exponent > other.exponent ? exponent : other.exponent;
    value = std::ldexp(value, 2 * (exponent - larger)) +
            std::ldexp(other.value, 2 * (other.exponent - larger));
    exponent = larger;
  }
  HEADROOM_HOST_DEVICE double root() const { return std::ldexp(std::sqrt(value), exponent); }
};

/// Counts by magnitude, made on request.
struct GradDetail {
  static constexpr int kMinExponent = -149;  // FP32's smallest subnormal
  static constexpr int kMaxExponent = 127;

  int64_t zeros = 0;
  int64_t subnormals = 0;  // subnormal in the gradient's own type
  /// histogram[e - kMinExponent]: finite elements with 2^e <= |x| < 2^(e+1). f64 elements outside
  /// the range are counted at its ends. Empty unless asked for.
  std::vector<int64_t> histogram;
};

/// What one read of a list of gradients found. All of it describes the gradients as they are in
/// memory, that is, still scaled. Non-finite elements count in inf_count and nan_count only.
struct GradStats {
  int64_t count = 0;  // elements read
  int64_t inf_count = 0;
  int64_t nan_count = 0;
  double amax = 0.0;     // largest finite magnitude
  SumOfSquares squares;  // of the finite elements

  int64_t culprit = -1;  // index in the list of the first tensor with inf or nan; -1 if none
  int64_t culprit_inf = 0;
  int64_t culprit_nan = 0;

  GradDetail detail;  // only if asked for

  bool finite() const { return inf_count == 0 && nan_count == 0; }
  /// L2 norm of the gradients as they are in memory. NaN if any element is NaN, else inf if any is
  /// inf. Right even where the squares leave FP32's range.
  HEADROOM_API double norm() const;
};

struct MeasureOptions {
  bool detail = false;  // fill GradStats::detail, in the same read
};

/// Reads every tensor once. Types may be mixed, tensors may be empty, any number of them, any size.
/// The result is the same bits for any number of threads and on every SIMD target: elements are
/// added in a fixed order that depends on the list alone.
HEADROOM_API GradStats measure(const std::vector<TensorView>& grads,
                               const MeasureOptions& options = {});

/// measure() of the gradients of parameters; GradStats::culprit is an index into `parameters`.
HEADROOM_API GradStats measure(const std::vector<Parameter>& parameters,
                               const MeasureOptions& options = {});

/// What unscale_ found and did.
struct UnscaleResult {
  GradStats before;       // the gradients as they arrived
  int64_t new_inf = 0;    // finite elements that became inf: 1/scale was too large for the type
  int64_t new_zeros = 0;  // nonzero elements that became zero (16-bit gradients underflow again)
  bool ok() const { return before.finite() && new_inf == 0; }
};

/// Multiplies every gradient by `inverse_scale` in place, in FP32 (f64 gradients: in double),
/// rounded once to the gradient's type. Non-finite elements are multiplied like the rest. Throws
/// Error(kInvalidArgument), changing nothing, if two of them share memory.
HEADROOM_API UnscaleResult unscale_(const std::vector<TensorView>& grads, float inverse_scale);

/// "3 inf, 0 nan", with the name of the culprit before it: "embed.weight: 3 inf, 0 nan". Empty if
/// there is no culprit.
HEADROOM_API std::string describe_culprit(const GradStats& stats,
                                          const std::vector<Parameter>& parameters);

}  // namespace headroom

#endif  // HEADROOM_MEASURE_H_
