// FP32 sums of unscaled gradients: for several losses that each have a scale of their own, and for
// micro-batches between which the scale may move.
#ifndef HEADROOM_ACCUMULATE_H_
#define HEADROOM_ACCUMULATE_H_

#include <headroom/export.h>
#include <headroom/optimizer.h>
#include <headroom/scaler.h>

#include <memory>
#include <string>
#include <vector>

namespace headroom {

namespace internal {
struct Accumulator;
}

/// Takes gradients in place of an optimizer: GradScaler::step on it measures them, divides by that
/// scaler's scale and adds them to FP32 sums. The real optimizer is made on summed() and stepped
/// through step().
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
/// One bad gradient since the last step() and that step is skipped; only the scaler whose loss
/// overflowed shrinks. Costs 4 bytes a parameter. One thread at a time may use it.
class HEADROOM_API GradAccumulator : public FusedOptimizer {
 public:
  explicit GradAccumulator(std::vector<Parameter> parameters);
  ~GradAccumulator() override;
  GradAccumulator(GradAccumulator&&) noexcept;
  GradAccumulator& operator=(GradAccumulator&&) noexcept;

  /// The same names and weights, with the FP32 sums as gradients.
  const std::vector<Parameter>& summed() const;

  /// Steps `optimizer`, which was made on summed() or a part of it, and zeroes its sums. The
  /// report's scale is 1. At most once for each optimizer between two gradients, and not before the
  /// first.
  StepReport step(Optimizer& optimizer, const StepOptions& options = {});

  /// Throws also if the parameter had no gradient when the accumulator was made: it has no sum.
  void set_grad(size_t index, const TensorView& grad) override;

  /// Takes the gradients of another list; its weights are not looked at.
  void rebind(std::vector<Parameter> parameters) override;

  void apply(float multiplier, bool clear_grads) override;
  void skipped(const std::string& culprit) override;

 private:
  internal::CudaApply* cuda_side(int device, internal::ApplyJob* job) override;

  std::unique_ptr<internal::Accumulator> impl_;
};

}  // namespace headroom

#endif  // HEADROOM_ACCUMULATE_H_
