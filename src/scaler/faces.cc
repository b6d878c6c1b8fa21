#include <headroom/faces.h>

namespace headroom {

LossScaleOptimizer::LossScaleOptimizer(Optimizer& inner, const ScalePolicy& policy,
                                       ScalerOptions options)
    : inner_(inner), scaler_(policy, std::move(options)) {}

StepReport LossScaleOptimizer::apply(const StepOptions& options) {
  const StepReport report = scaler_.step(inner_, options);
  iterations_ += report.applied;
  scaler_.update();
  return report;
}

StepReport scale_loss(float loss, GradScaler& scaler, Optimizer& optimizer,
                      const std::function<void(float)>& backward, const StepOptions& options) {
  backward(scaler.scale(loss));
  const StepReport report = scaler.step(optimizer, options);
  scaler.update();
  return report;
}

}  // namespace headroom
