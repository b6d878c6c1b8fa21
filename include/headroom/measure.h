// measure: reads all gradients once and finds everything that the later stages need: inf and nan,
// norm, largest magnitude, the first bad tensor. It knows nothing of optimizers or policies.
#ifndef HEADROOM_MEASURE_H_
#define HEADROOM_MEASURE_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// What one read of a list of gradients found. All of it describes the gradients as they were in
/// memory before the call, that is, still scaled. Elements that are inf or nan count in inf_count
/// and nan_count only.
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
  int64_t culprit_rank = -1;  // with several ranks: the first one that has a culprit

  int64_t new_inf = 0;    // by unscale_: finite elements that became inf (1/scale was too large)
  int64_t new_zeros = 0;  // by unscale_: nonzero elements that became zero (16-bit underflow)

  HEADROOM_HOST_DEVICE bool finite() const { return inf_count == 0 && nan_count == 0; }

  /// Finite before and after unscale_.
  HEADROOM_HOST_DEVICE bool ok() const { return finite() && new_inf == 0; }

  /// L2 norm of the gradients as they were in memory. NaN if any element is NaN, else inf if any is
  /// inf. Right even where the squares leave FP32's range.
  HEADROOM_API double norm() const;
};

/// Counts by magnitude.
struct GradDetail {
  static constexpr int kMinExponent = -149;  // FP32's smallest subnormal
  static constexpr int kMaxExponent = 127;
  static constexpr int kBins = kMaxExponent - kMinExponent + 1;

  int64_t zeros = 0;
  int64_t subnormals = 0;  // subnormal in the gradient's own type
  /// histogram[e - kMinExponent]: finite elements with 2^e <= |x| < 2^(e+1). f64 elements outside
  /// the range are counted at its ends.
  std::array<int64_t, kBins> histogram = {};
};

/// Reads every tensor once. Types may be mixed, tensors may be empty, any number of them, any size.
/// The result is the same bits for any number of threads and on every SIMD target: elements are
/// added in a fixed order that depends on the list alone.
/// With `detail` (not null) the same read also counts by magnitude.
HEADROOM_API GradStats measure(const std::vector<TensorView>& grads, GradDetail* detail = nullptr);

/// measure() of the gradients of parameters; GradStats::culprit is an index into `parameters`.
HEADROOM_API GradStats measure(const std::vector<Parameter>& parameters,
                               GradDetail* detail = nullptr);

/// Multiplies every gradient by `inverse_scale` in place, in FP32 (f64 gradients: in double),
/// rounded once to the gradient's type. Elements that are inf or nan are multiplied like the rest.
/// Returns what measure() would have found before, with new_inf and new_zeros. Throws
/// Error(kInvalidArgument), changing nothing, if two gradients share memory.
HEADROOM_API GradStats unscale_(const std::vector<TensorView>& grads, float inverse_scale);

/// "3 inf, 0 nan", with the name of the culprit before it: "embed.weight: 3 inf, 0 nan". Empty if
/// there is no culprit.
HEADROOM_API std::string describe_culprit(const GradStats& stats,
                                          const std::vector<Parameter>& parameters);

}  // namespace headroom

#endif  // HEADROOM_MEASURE_H_
