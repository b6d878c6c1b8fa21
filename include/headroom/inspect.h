// inspect: how gradients fare in a 16-bit or 8-bit format at a given scale, and which static scale
// suits them.
#ifndef HEADROOM_INSPECT_H_
#define HEADROOM_INSPECT_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {
namespace internal {
class MagnitudeCounter;
}

/// Formats of gradients. E5M2 and E4M3 are the 8-bit formats of the OCP.
enum class Format : uint8_t { kFP16, kBF16, kE5M2, kE4M3 };

/// The thresholds of rounding a number x to a format (to nearest, ties to even).
struct FormatLimits {
  const char* name;    // "fp16"
  double flush;        // |x| <= flush becomes zero
  double normal;       // flush < |x| < normal becomes a subnormal number
  double overflow;     // |x| >= overflow becomes inf
  bool tie_overflows;  // if false, |x| = overflow still fits (E4M3, which has no inf: beyond 464 a
                       // number becomes NaN, or 448 where the conversion saturates)
};

/// The limits of a format.
HEADROOM_API const FormatLimits& limits(Format format);

/// Counts of the finite nonzero gradients that a format does not represent as normal numbers.
struct Outcome {
  int64_t flushed = 0;    // become zero
  int64_t subnormal = 0;  // lose some of their bits
  int64_t overflow = 0;   // become inf or NaN

  /// Adds the counts of another part of the gradients.
  Outcome& operator+=(const Outcome& other) {
    flushed += other.flushed;
    subnormal += other.subnormal;
    overflow += other.overflow;
    return *this;
  }
};

/// A histogram of magnitudes, just fine enough to compute the exact Outcome for any format and any
/// power of two. One read of the gradients fills it. Thread-safe for reading while no thread adds.
class HEADROOM_API Magnitudes {
 public:
  /// Reads the tensor once, with several threads if it is large. Host memory only.
  void add(const TensorView& grads);
  /// Adds the counts of another histogram.
  void merge(const Magnitudes& other);

  /// Counts and magnitudes of what add() has read.
  int64_t count() const { return count_; }  // of all elements
  int64_t zeros() const { return zeros_; }
  int64_t infs() const { return infs_; }
  int64_t nans() const { return nans_; }
  int64_t nonzero() const { return count_ - zeros_ - infs_ - nans_; }  // and finite
  double largest() const { return largest_; }    // magnitude of those; 0 if there are none
  double smallest() const { return smallest_; }  // likewise

  /// The outcome for the gradients times 2^power, with power in [-126, 126].
  Outcome at(Format format, int power) const;

 private:
  friend class internal::MagnitudeCounter;
  struct Cell {  // see src/inspect/cells.h
    int32_t key;
    int64_t count;
  };
  std::vector<Cell> cells_;  // by key
  int64_t count_ = 0;
  int64_t zeros_ = 0;
  int64_t infs_ = 0;
  int64_t nans_ = 0;
  double largest_ = 0.0;
  double smallest_ = 0.0;
};

/// The outcome for the gradients times `scale`, which may be any scale of a GradScaler. The product
/// is not rounded before it is compared. Host memory only.
HEADROOM_API Outcome outcome_at(const TensorView& grads, Format format, float scale);

/// Options of advise().
struct AdviceOptions {
  Format format = Format::kFP16;
  double lose = 1e-3;  // share of the nonzero gradients that may become zero
  int margin = 3;      // the largest gradient times the scale stays 2^margin times below overflow
};

/// A recommendation for a static scale.
struct ScaleAdvice {
  enum class Verdict : uint8_t {
    kNothing,   // there is no finite gradient other than zero
    kUnneeded,  // scale 1 is as good
    kScale,     // use `scale`
    kNoneFits,  // even `scale`, the largest with the margin (or 2^-126), loses too many gradients
  };
  Verdict verdict = Verdict::kNothing;
  float scale = 1.0f;    // a power of two
  Outcome outcome;       // at `scale`
  float lowest = 0.0f;   // the range of powers of two at which nothing overflows and at most
  float highest = 0.0f;  // `lose` of the nonzero gradients become zero; 0 if there are none
  std::string reason;    // one sentence
};

/// Recommends the largest power of two that keeps the largest gradient 2^margin times below
/// overflow, since it loses the fewest gradients. If smaller ones lose no more and leave no
/// gradient subnormal, the middle of all of those. Scale 1 if at most `lose` of the nonzero
/// gradients become zero or subnormal there.
HEADROOM_API ScaleAdvice advise(const Magnitudes& gradients, const AdviceOptions& options = {});

}  // namespace headroom

#endif  // HEADROOM_INSPECT_H_
