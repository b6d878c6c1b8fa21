// ranges: how close the tensors of a forward and backward pass come to the ends of FP16's range,
// and which operation leaves it first. RangeTable measures tensors on their device, without
// waiting; RangeReport, part of headroom::tools, evaluates the measurements.
#ifndef HEADROOM_RANGES_H_
#define HEADROOM_RANGES_H_

#include <headroom/export.h>
#include <headroom/owned.h>
#include <headroom/runtime.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {
namespace internal {
class Ranges;
struct RangesAccess;
}  // namespace internal

/// Element counts of one tensor by their fate in FP16 (rounding to nearest even; see limits() in
/// inspect.h), whatever its own type. Trivially copyable; the same bytes on host and device.
struct RangeStats {
  int64_t count = 0;
  int64_t zeros = 0;
  int64_t flushed = 0;    // not zero, but would become zero
  int64_t subnormal = 0;  // would lose some of their bits
  int64_t overflow = 0;   // finite, but would become inf; always 0 for f16
  int64_t positive_inf = 0;
  int64_t negative_inf = 0;
  int64_t nan = 0;
  double amax = 0.0;  // largest finite magnitude

  /// Infinite elements of both signs; whether there is neither inf nor NaN.
  int64_t inf() const { return positive_inf + negative_inf; }
  bool finite() const { return inf() + nan == 0; }

  /// How often the largest element can be doubled before FP16 overflows; negative if it does not
  /// fit now. Inf if all finite elements are zero.
  HEADROOM_API double headroom_bits() const;
};

/// One row of statistics per tensor, in the order of the calls. On CUDA a row is filled by one
/// kernel on the caller's stream and stays on the device until finish() copies the table to pinned
/// memory. Nothing waits except read(), and the first use of a device, which allocates: call
/// prepare() before. Not thread-safe.
class HEADROOM_API RangeTable {
 public:
  /// Memory for `rows` tensors on each device. Further tensors are not measured.
  explicit RangeTable(int64_t rows = 16384);
  ~RangeTable();
  RangeTable(RangeTable&&) noexcept;
  RangeTable& operator=(RangeTable&&) noexcept;

  /// Allocates the table of a device.
  void prepare(Device device, Stream stream = {});

  /// Discards all rows. Enqueues zeros for the tables on CUDA devices.
  void begin(Stream stream = {});

  /// Measures one tensor and returns the index of its row; -1 if the table of its device is full.
  /// The tensor may be freed or changed by later work on the same stream.
  int64_t measure(const TensorView& tensor, Stream stream = {});

  /// Enqueues the copy to the host. Call it on a stream that has waited for all measure() calls.
  void finish(Stream stream = {});

  /// Whether read() would return without waiting; false before finish().
  bool ready() const;

  /// All rows. Throws Error(kWrongOrder) before finish().
  std::vector<RangeStats> read() const;

 private:
  friend struct internal::RangesAccess;
  internal::Owned<internal::Ranges> impl_;
};

/// Whether a tensor is a result of forward or a gradient of backward.
enum class RangeDirection : uint8_t { kForward, kBackward };

/// Where a tensor came from.
enum class RangeSource : uint8_t {
  kOperation,  // computed by an operation; in backward: a gradient
  kInput,      // passed to the model
  kParameter,
  kConstant,  // created or filled on purpose, such as an attention mask: may contain inf
};

/// Whether an operation of torch writes constants, which may be infinite on purpose (kConstant):
/// "masked_fill", "full", "where", ...
HEADROOM_API bool fills_constants(const std::string& operation);

/// A measured tensor and the operation that computed it.
struct RangeRow {
  std::string module;     // of the operation or parameter; empty outside of all modules
  std::string operation;  // "mul"; in backward the operation whose backward computed the gradient
  std::string tensor;     // name of an input or parameter, or what a gradient belongs to
  RangeDirection direction = RangeDirection::kForward;
  RangeSource source = RangeSource::kOperation;
  DType dtype = DType::kF32;
  std::vector<int64_t> inputs;  // rows of the tensors that it was computed from, all smaller
  RangeStats stats;

  /// "block.3.mlp: mul", "block.3.mlp: backward of mul", "parameter embed.weight", "input x".
  HEADROOM_API std::string label() const;
};

/// The rows of one step in program order, and what follows from them.
class HEADROOM_API RangeReport {
 public:
  /// Throws Error(kInvalidArgument) if a row names an input that is not before it.
  explicit RangeReport(std::vector<RangeRow> rows);
  const std::vector<RangeRow>& rows() const { return rows_; }

  /// The first row with inf or NaN that were not put there on purpose; -1 if there is none.
  /// Inputs and parameters count only if a result computed from them is bad, too. On purpose is
  /// -inf in constants and inputs, and what is computed from those, as long as it remains -inf.
  int64_t first_bad() const { return first_bad_; }

  /// Whether all tensors that the row was computed from are finite.
  bool inputs_finite(int64_t row) const;

  /// Results within `bits` doublings of FP16's limit or beyond it, nearest first. If anything is
  /// f16, only f16 tensors: the others were given a wider type.
  std::vector<int64_t> near_overflow(double bits = 3.0) const;

  /// Modules to keep in FP32: those whose forward results are near overflow, or overflow.
  std::vector<std::string> islands() const;

  /// What to do about `first_bad()` and about gradients lost to underflow, one sentence each; empty
  /// if nothing is wrong.
  std::vector<std::string> advice() const;

  /// A short table and the advice: several lines, without an end of the last one.
  std::string to_string() const;

 private:
  bool only_f16() const;
  std::string advice_for(int64_t row) const;

  std::vector<RangeRow> rows_;
  std::vector<bool> masks_;  // by row: large or infinite on purpose
  int64_t first_bad_ = -1;
};

}  // namespace headroom

#endif  // HEADROOM_RANGES_H_
