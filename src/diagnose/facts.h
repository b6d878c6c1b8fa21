// diagnose/ judges the history of a run by a list of rules. It must not know how a history is
// written, nor about models or pages.
//
// This header has the figures that several rules use.
#ifndef HEADROOM_SRC_DIAGNOSE_FACTS_H_
#define HEADROOM_SRC_DIAGNOSE_FACTS_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/element.h"
#include "record/history.h"

namespace headroom::internal {

/// Doublings of the scale. Fewer may be needed for the next larger gradient.
inline constexpr double kMuchRoom = 3.0;

/// Consecutive steps that were skipped because of inf or NaN gradients: indices of History::steps,
/// `end` past the last.
struct SkipStreak {
  size_t begin = 0;
  size_t end = 0;
  bool open = false;  // it lasts to the end of the history
  size_t length() const { return end - begin; }
};

/// Shares of the nonzero gradients that FP16 makes zero or subnormal.
struct RangeLoss {
  double lost = 0.0;
  double subnormal = 0.0;
};

/// The tensor with the largest gradients, if it is the same one in most records.
struct TopTensor {
  std::string name;
  double ahead = 0.0;  // doublings by which it exceeds every other tensor, at least
  RangeLoss others;    // of all other tensors
};

/// "Recent" is the second half of the steps after warm-up: what a run ends with matters, not how it
/// began.
struct RunFacts {
  explicit RunFacts(const History& run);

  const History& history;
  const std::vector<HistoryStep>& steps;
  std::string precision;  // "fp16", "bf16", "fp32", or empty: not recorded
  size_t settled = 0;     // index of the first step after warm-up
  size_t recent = 0;      // index of the first recent step
  std::vector<SkipStreak> streaks;
  size_t applied = 0;
  /// False for a loop that records NaN where it does not know its loss: always, or in some of the
  /// steps that were applied, whose gradients were finite.
  bool has_losses = false;

  /// Doublings of the scale until the largest gradient of the recent steps overflows FP16.
  /// Gradients of activations are not recorded, so a scale that has failed bounds it, too, until a
  /// later step is applied at that scale or above.
  std::optional<double> room;
  size_t failed_at_bound = 0;          // recent steps that failed at such a scale; 0 if none bounds
  std::optional<RangeLoss> loss;       // in the recent records of layers
  std::optional<double> cast_to_zero;  // share of the values that casts made zero, if measured
  std::optional<TopTensor> top;        // in the recent records

  /// False for BF16 and FP32, whose range needs no scaling.
  bool narrow() const { return precision != "bf16" && precision != "fp32"; }
  /// Whether the policy scales the loss at all.
  bool scales() const;
  /// Whether the forward pass has failed: the loss was inf, or NaN like the gradients.
  bool bad_loss(const HistoryStep& step) const;
  /// Whether a skipped step is the fault of its batch: the loss was bad after earlier steps were
  /// applied; or the gradients were NaN without inf at a scale that had worked, although the
  /// previous ones were far from overflow.
  bool blames_batch(size_t index) const;
  double last_scale() const { return steps.empty() ? 1.0 : steps.back().scale; }
  /// Whether gradients are lost or subnormal to a degree that a better scale would cure.
  bool underflows() const;
  /// "FP16 makes 1.2 % of the nonzero gradients zero and 9 % of the remaining ones are subnormal".
  std::string underflow_text() const;

 private:
  void find_room();
  /// Whether one of the 64 steps before `index` was applied at this scale or a higher one.
  bool was_applied_at(double scale, size_t index) const;
};

/// Whether a step was skipped because of inf or NaN in its gradients, not because of their norm.
bool overflowed(const HistoryStep& step);
/// Whether the gradients were NaN without any inf: not the sign of a scale that is too high.
bool only_nan(const HistoryStep& step);

/// "2^16", or the number itself if it is not a power of two.
std::string scale_text(double scale);
/// "1 doubling", "21 doublings".
std::string doublings_text(double doublings);
/// "12.3 %".
std::string share_text(double share);
/// "step 7", "steps 7 to 19".
std::string steps_text(const RunFacts& run, const SkipStreak& streak);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DIAGNOSE_FACTS_H_
