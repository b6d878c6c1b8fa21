// FP32 sums of unscaled gradients, for several losses with a scale each, and for micro-batches
// between which the scale may change.
#ifndef HEADROOM_ACCUMULATE_H_
#define HEADROOM_ACCUMULATE_H_

#include <headroom/export.h>
#include <headroom/optimizer.h>
#include <headroom/owned.h>
#include <headroom/scaler.h>

#include <string>
#include <vector>

namespace headroom {

namespace internal {
struct Accumulator;
}

/// Stands in for the optimizer: GradScaler::step on it measures the gradients, divides them by that
/// scaler's scale and adds them to FP32 sums. The real optimizer is constructed with summed() and
/// stepped through step().
///
///     GradAccumulator sums(params);
///     AdamW optimizer(sums.summed());
///     for (each loss i) {
///       backward(scaler[i].scale(loss[i]));
///       scaler[i].step(sums, {.clear_grads = ClearGrads::kAlways});
///       scaler[i].update();
///     }
///     sums.step(optimizer, {.max_norm = 1.0f});
///
/// If any gradient since the last step() was bad, the next step() is skipped; only the scale of the
/// scaler whose loss overflowed shrinks. Needs 4 bytes per parameter element. Not thread-safe.
class HEADROOM_API GradAccumulator : public FusedOptimizer {
 public:
  /// Sums for the gradients of these parameters.
  explicit GradAccumulator(std::vector<Parameter> parameters);
  ~GradAccumulator() override;
  GradAccumulator(GradAccumulator&&) noexcept;
  GradAccumulator& operator=(GradAccumulator&&) noexcept;

  /// The parameters with the FP32 sums as gradients.
  const std::vector<Parameter>& summed() const;

  /// Steps `optimizer`, which uses summed() or a part of it, and zeroes its sums. The report's
  /// scale is 1. Throws Error(kWrongOrder) if no gradient was added, or if this optimizer was
  /// stepped since the last one.
  StepReport step(Optimizer& optimizer, const StepOptions& options = {});

  /// Also throws if the parameter had no gradient at construction: it has no sum then.
  void set_grad(size_t index, const TensorView& grad) override;

  /// Replaces the gradients by those of another list; its weights are ignored.
  void rebind(std::vector<Parameter> parameters) override;

  void apply(float multiplier, bool clear_grads) override;
  void skipped(const std::string& culprit) override;

 private:
  internal::Owned<internal::Accumulator> impl_;
};

}  // namespace headroom

#endif  // HEADROOM_ACCUMULATE_H_
