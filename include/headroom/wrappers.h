// GradScaler behind the interfaces of Keras, Apex and MXNet.
#ifndef HEADROOM_WRAPPERS_H_
#define HEADROOM_WRAPPERS_H_

#include <headroom/export.h>
#include <headroom/scaler.h>

#include <functional>

namespace headroom {

/// Keras: an optimizer with its own loss scale.
///
///     LossScaleOptimizer optimizer(adamw);         // Keras 3's defaults
///     backward(optimizer.scale_loss(loss));
///     optimizer.apply();                           // unscale, check, step or skip, adapt
///
/// Not thread-safe.
class HEADROOM_API LossScaleOptimizer {
 public:
  /// Keeps a reference to `inner`, which must outlive this object.
  explicit LossScaleOptimizer(Optimizer& inner, const ScalePolicy& policy = preset("keras"),
                              ScalerOptions options = {});

  /// The loss to start backward from.
  float scale_loss(float loss) { return scaler_.scale(loss); }

  /// step() and update() in one.
  StepReport apply(const StepOptions& options = {});

  /// Number of applied steps; skipped ones do not count. Waits for a CUDA device.
  int64_t iterations() const;
  float loss_scale() const { return scaler_.get_scale(); }
  GradScaler& scaler() { return scaler_; }

 private:
  Optimizer& inner_;
  GradScaler scaler_;
  int64_t iterations_ = 0;
  bool pending_ = false;  // the last step was on a CUDA device, which counts the applied ones
};

/// Apex and MXNet: the scaled loss exists only within a scope, here a function that runs backward.
/// After it, the gradients are checked, the step is applied or skipped, and the scale is updated.
///
///     StepReport report = scale_loss(loss, scaler, optimizer, [&](float scaled) {
///       backward(scaled);
///     });
///
/// If `backward` throws, nothing is stepped or updated and the exception propagates.
HEADROOM_API StepReport scale_loss(float loss, GradScaler& scaler, Optimizer& optimizer,
                                   const std::function<void(float)>& backward,
                                   const StepOptions& options = {});

}  // namespace headroom

#endif  // HEADROOM_WRAPPERS_H_
