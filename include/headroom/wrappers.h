// The same GradScaler behind the interfaces that users of Keras, Apex and MXNet know.
#ifndef HEADROOM_WRAPPERS_H_
#define HEADROOM_WRAPPERS_H_

#include <headroom/export.h>
#include <headroom/scaler.h>

#include <functional>

namespace headroom {

/// Keras: an optimizer wrapped with its own loss scale.
///
///     LossScaleOptimizer optimizer(adamw);         // Keras 3's defaults
///     backward(optimizer.scale_loss(loss));
///     optimizer.apply();                           // unscale, check, step or skip, adapt
///
/// One thread at a time may use it and the optimizer inside.
class HEADROOM_API LossScaleOptimizer {
 public:
  /// Holds a reference to `inner`, which must outlive it.
  explicit LossScaleOptimizer(Optimizer& inner, const ScalePolicy& policy = preset("keras"),
                              ScalerOptions options = {});

  float scale_loss(float loss) { return scaler_.scale(loss); }

  /// step() and update() in one.
  StepReport apply(const StepOptions& options = {});

  /// Steps that were applied; a skipped one does not count. Waits for a CUDA device.
  int64_t iterations() const;
  float loss_scale() const { return scaler_.get_scale(); }
  GradScaler& scaler() { return scaler_; }

 private:
  Optimizer& inner_;
  GradScaler scaler_;
  int64_t iterations_ = 0;
  bool pending_ = false;  // a scaler on a CUDA device counts them
};

/// Apex and MXNet: the scaled loss exists only inside a scope, here a function that runs backward.
/// Leaving it checks the gradients, steps or skips, and adapts the scale.
///
///     StepReport report = scale_loss(loss, scaler, optimizer, [&](float scaled) {
///       backward(scaled);
///     });
///
/// If `backward` throws, nothing is stepped or updated and the exception goes on.
HEADROOM_API StepReport scale_loss(float loss, GradScaler& scaler, Optimizer& optimizer,
                                   const std::function<void(float)>& backward,
                                   const StepOptions& options = {});

}  // namespace headroom

#endif  // HEADROOM_WRAPPERS_H_
