// measure: reads all gradients once and collects everything that the later stages need: inf and
// nan, norm, largest magnitude, the first bad tensor.
#ifndef HEADROOM_MEASURE_H_
#define HEADROOM_MEASURE_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Statistics of a list of gradients, as they were in memory before the call, that is, still
/// scaled. Elements that are inf or nan are counted in inf_count and nan_count and ignored
/// otherwise.
///
/// Trivially copyable: the same bytes on the host, on a CUDA device, between ranks and in reports.
struct GradStats {
  int64_t count = 0;  // elements read
  int64_t inf_count = 0;
  int64_t nan_count = 0;
  double amax = 0.0;  // largest finite magnitude

  /// Sums of squares of the finite elements, split by magnitude so that none overflows or
  /// underflows: [0] of f64 elements below 2^-450, multiplied by 2^600; [1] of ordinary elements;
  /// [2] of f64 elements of 2^450 and above, multiplied by 2^-600.
  double squares[3] = {0.0, 0.0, 0.0};

  int64_t culprit = -1;  // index in the list of the first tensor with inf or nan; -1 if none
  int64_t culprit_inf = 0;
  int64_t culprit_nan = 0;
  int64_t culprit_rank = -1;  // with several ranks: the first rank that has a culprit

  int64_t new_inf = 0;    // by unscale_: finite elements that became inf (1/scale was too large)
  int64_t new_zeros = 0;  // by unscale_: nonzero elements that became zero (16-bit underflow)

  /// Whether there is neither inf nor NaN.
  HEADROOM_HOST_DEVICE bool finite() const { return inf_count == 0 && nan_count == 0; }

  /// Finite before and after unscale_.
  HEADROOM_HOST_DEVICE bool ok() const { return finite() && new_inf == 0; }

  /// L2 norm of the gradients as they were in memory. NaN if any element is NaN, else inf if any is
  /// inf. Correct even where the squares exceed the range of FP32.
  HEADROOM_API double norm() const;
};

/// Counts by magnitude.
struct GradDetail {
  static constexpr int kMinExponent = -149;  // FP32's smallest subnormal
  static constexpr int kMaxExponent = 127;
  static constexpr int kBins = kMaxExponent - kMinExponent + 1;

  int64_t zeros = 0;       // +0 and -0
  int64_t subnormals = 0;  // subnormal in the gradient's own type
  /// histogram[e - kMinExponent]: finite elements with 2^e <= |x| < 2^(e+1). f64 elements outside
  /// the range are counted at its ends.
  std::array<int64_t, kBins> histogram = {};
};

/// Reads every tensor once. Types may be mixed, and tensors may be empty. The result is the same
/// bits for any number of threads and on every SIMD target: elements are added in a fixed order
/// that depends on the list alone. If `detail` is not null, elements are also counted by magnitude.
/// Waits for tensors on CUDA devices.
HEADROOM_API GradStats measure(const std::vector<TensorView>& grads, GradDetail* detail = nullptr);

/// measure() of the gradients of parameters; GradStats::culprit is an index into `parameters`.
HEADROOM_API GradStats measure(const std::vector<Parameter>& parameters,
                               GradDetail* detail = nullptr);

/// Multiplies every gradient by `inverse_scale` in place, in FP32 (f64 gradients: in double), and
/// rounds once to the gradient's type. Elements that are inf or nan are multiplied like the rest.
/// Returns the result of measure() before the multiplication, with new_inf and new_zeros. Throws
/// Error(kInvalidArgument), changing nothing, if two gradients share memory.
HEADROOM_API GradStats unscale_(const std::vector<TensorView>& grads, float inverse_scale);

/// The culprit with its counts: "embed.weight: 3 inf, 0 nan". Empty if there is none.
HEADROOM_API std::string describe_culprit(const GradStats& stats,
                                          const std::vector<Parameter>& parameters);

}  // namespace headroom

#endif  // HEADROOM_MEASURE_H_
