// GradScaler behind the interfaces of Keras, Apex and MXNet.
#include <headroom/error.h>
#include <headroom/wrappers.h>

namespace headroom {
namespace {

StepReport step_and_update(GradScaler& scaler, Optimizer& optimizer, const StepOptions& options) {
  try {
    StepReport report = scaler.step(optimizer, options);
    scaler.update();
    return report;
  } catch (const Error& error) {
    // OnOverflow::kThrow: the step was skipped and reported by this error. The round still ends.
    if (error.code() == ErrorCode::kOverflow) scaler.update();
    throw;
  }
}

}  // namespace

LossScaleOptimizer::LossScaleOptimizer(Optimizer& inner, const ScalePolicy& policy,
                                       ScalerOptions options)
    : inner_(inner), scaler_(policy, std::move(options)) {}

StepReport LossScaleOptimizer::apply(const StepOptions& options) {
  StepReport report = step_and_update(scaler_, inner_, options);
  iterations_ += report.applied;
  pending_ = report.pending;
  return report;
}

// On a CUDA device the host does not know which steps were applied; the report does.
int64_t LossScaleOptimizer::iterations() const {
  if (!pending_) return iterations_;
  const StepReport last = scaler_.report(inner_);
  return last.steps - last.skipped;
}

StepReport scale_loss(float loss, GradScaler& scaler, Optimizer& optimizer,
                      const std::function<void(float)>& backward, const StepOptions& options) {
  backward(scaler.scale(loss));
  return step_and_update(scaler, optimizer, options);
}

}  // namespace headroom
