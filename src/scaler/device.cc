// Scalers whose scale is on a CUDA device. The host only checks the order of calls and enqueues;
// the device decides. Nothing here waits, except report_of() and optimizers that have no CUDA side.
#include <cstring>

#include "core/check.h"
#include "core/float_environment.h"
#include "scaler/scaler.h"

namespace headroom {

using internal::require;

void GradScaler::scale(const TensorView& loss, const TensorView& scaled, Stream stream) {
  internal::check_view(loss, internal::Access::kRead, "The loss");
  internal::check_view(scaled, internal::Access::kWrite, "The scaled loss");
  const bool on_device = impl_->on_device() && enabled();
  if (on_device) impl_->check_on_device(loss);
  require(scaled.dtype == DType::kF32 && loss.dtype != DType::kF64 && loss.count == scaled.count &&
              internal::same_device(loss.device, scaled.device),
          ErrorCode::kMismatch,
          "scale() needs a loss of f16, bf16 or f32 and an f32 tensor of the same size on the same "
          "device for the result.");
  require(loss.data == scaled.data ? loss.dtype == DType::kF32 : !internal::overlap(loss, scaled),
          ErrorCode::kInvalidArgument,
          "The loss and the scaled loss share memory in part; give the result its own.");
  const StreamScope scope(stream);
  if (on_device) {
    impl_->cuda->scale(loss, scaled);
    impl_->order.gradients_added();
    return;
  }
  const float factor = scale(1.0f);
  if (loss.device.type == DeviceType::kCUDA) return internal::cuda_scale(loss, factor, scaled);
  const internal::DefaultFloatEnvironment environment;
  if (loss.data != scaled.data) convert(loss, scaled);
  auto* const out = static_cast<char*>(scaled.data);  // may have any alignment
  for (int64_t i = 0; i < scaled.count; ++i) {
    float value = 0.0f;
    std::memcpy(&value, out + i * sizeof(float), sizeof(float));
    value *= factor;
    std::memcpy(out + i * sizeof(float), &value, sizeof(float));
  }
}

const float* GradScaler::device_scale() {
  require(impl_->on_device() && enabled(), ErrorCode::kUnsupported,
          "device_scale() needs an enabled scaler whose ScalerOptions::device is a CUDA device.");
  impl_->order.assume_losses();
  return impl_->cuda->scale_address();
}

namespace internal {

// The binding multiplies the loss by `factor`, which becomes 1 x scale on the device.
void ScalerAccess::begin_loss(GradScaler& scaler, const TensorView& one, const TensorView& factor) {
  scaler.impl_->check_on_device(one);
  scaler.impl_->cuda->scale(one, factor);
  scaler.impl_->order.loss_scaled();
}

void Scaler::check_on_device(const TensorView& loss) const {
  require(same_device(loss.device, options.device), ErrorCode::kMismatch,
          "The loss is not on the CUDA device where this scaler's scale is.");
}

void Scaler::move_to_host() {
  if (!on_device()) return;
  record.numbers = cuda->wait_numbers();
  seen_ = cuda->wait_seen();
  for (auto& [id, entry] : optimizers) {
    if (entry.cuda == nullptr) continue;
    if (const auto report = report_from_device(entry)) entry.report = *report;
    CudaProgress progress;
    cuda_copy(options.device.index, &progress, entry.cuda->progress(), sizeof(progress));
    entry.numbers = progress.numbers;
    entry.unscaled = progress.unscaled;
    entry.cuda = nullptr;
    entry.listed_revision = 0;
  }
  cuda = nullptr;
  options.device = {};
}

// Throws Error(kMismatch) if a gradient is not on the scaler's device.
void Scaler::list_gradients(const Optimizer& optimizer, OptimizerEntry* entry) const {
  const uint64_t revision = optimizer.record_->revision;
  if (entry->listed_revision == revision) return;
  for (const Parameter& parameter : optimizer.parameters()) {
    const TensorView& grad = parameter.grad;
    const bool here = same_device(grad.device, options.device);
    require(here || grad.count == 0, ErrorCode::kMismatch, [&] {
      return "The gradient of parameter '" + parameter.name +
             "' is not on the CUDA device where this scaler's scale is; use a scaler on the CPU "
             "for gradients in several places.";
    });
  }
  if (entry->cuda == nullptr) entry->cuda = std::make_shared<CudaOptimizer>(options.device.index);
  entry->cuda->set_lists(gradients_of(optimizer), has_copies(optimizer)
                                                      ? gradients_of(optimizer, false)
                                                      : std::vector<TensorView>{});
  entry->listed_revision = revision;
}

CudaRanks Scaler::cuda_ranks(const Optimizer& optimizer, OptimizerEntry* entry,
                             const StepOptions* step) const {
  if (options.ranks == nullptr) return {};
  return {options.ranks.get(), rank_status(optimizer, entry, step)};
}

// Enqueues measure, agree, decide and apply. The returned report is pending, unless the optimizer
// needs the host.
StepReport Scaler::step_on_device(Optimizer& optimizer, const StepOptions& given,
                                  const ExternalScale& external, OptimizerEntry* entry) {
  list_gradients(optimizer, entry);
  entry->cuda->measure_gradients({});  // runs while the host prepares the rest
  ApplyJob job{given.clear_grads == ClearGrads::kAlways, false};
  CudaApply* const fused = optimizer.cuda_side(options.device.index, &job);
  const bool unscaled = order.is_unscaled(id_of(optimizer));
  const CudaStep step{{given.max_norm, given.skip_above_norm}, external, options.enabled, unscaled};
  cuda->decide(step, fused != nullptr ? fused->tables() : CudaTables{},
               cuda_ranks(optimizer, entry, &given), entry->cuda.get());
  const bool clear_skipped = given.clear_grads != ClearGrads::kNever;
  StepReport report;
  report.pending = true;
  // Three kinds of optimizers: ours and a user's with apply_on_device() read the verdict on the
  // device; for all others the host waits.
  if (fused != nullptr) {
    fused->step(job, clear_skipped);
  } else if (const DeviceVerdict* const verdict = &entry->cuda->progress()->verdict;
             optimizer.apply_on_device(verdict, job.clear_grads, stream_on(options.device.index))) {
    if (clear_skipped) entry->cuda->clear(&verdict->apply);
  } else {
    report = wait_and_apply(optimizer, given, unscaled, entry);
  }
  if (clear_skipped) optimizer.gradients_changed();
  last_stepped = id_of(optimizer);
  if (options.enabled) order.stepped(id_of(optimizer));
  return report;
}

// Finishes the step of an optimizer that cannot read the verdict on the device.
StepReport Scaler::wait_and_apply(Optimizer& optimizer, const StepOptions& given, bool unscaled,
                                  OptimizerEntry* entry) {
  cuda_wait(options.device.index);
  StepReport report = *report_from_device(*entry);
  const float scale = unscaled ? 1.0f : report.scale;
  if (report.applied && overflows_in_place(optimizer, given, scale)) {
    report.applied = false;
    report.skip = Skip::kUnscaleOverflow;
    report.culprit = describe_unscaling_in_place(report.stats.amax, scale);
    ++report.skipped;
    cuda->count_overflow();
    CudaProgress progress;  // the device has counted the step as applied
    cuda_copy(options.device.index, &progress, entry->cuda->progress(), sizeof(progress));
    ++progress.skipped;
    progress.numbers.found_inf = 1.0f;
    progress.verdict.apply = false;
    cuda_copy(options.device.index, entry->cuda->progress(), &progress, sizeof(progress));
  }
  entry->report = report;  // kept, because the optimizer's names may be gone later
  apply_or_skip(optimizer, given, report, entry->cuda->reports.read()->verdict.multiplier);
  return report;
}

// Raises what kernels have reported to the host since the last call.
void Scaler::raise_device_alarms() const {
  if (!on_device()) return;
  if (cuda->differences.latest() != differences_raised_) {
    differences_raised_ = cuda->differences.latest();
    const CudaDifference found = *cuda->differences.read();
    throw Error(ErrorCode::kRanksDiffer, difference_sentence(found.field, found.low, found.high));
  }
  if (cuda->alarms.latest() == alarms_raised_) return;
  alarms_raised_ = cuda->alarms.latest();
  const CudaAlarm alarm = *cuda->alarms.read();
  const auto found = optimizers.find(last_stepped);
  const auto report = found != optimizers.end() ? report_from_device(found->second) : std::nullopt;
  raise(alarm.alarm, alarm.scale, alarm.skips_in_row, report ? report->culprit : "");
}

// The newest report that the device has sent, without waiting; none before the first.
std::optional<StepReport> Scaler::report_from_device(const OptimizerEntry& entry) const {
  const auto found = entry.cuda != nullptr ? entry.cuda->reports.read() : std::nullopt;
  if (!found) return std::nullopt;
  if (found->steps == entry.report.steps) return entry.report;  // made by wait_and_apply()
  StepReport report = make_report(found->verdict, found->stats, found->scale);
  report.steps = found->steps;
  report.skipped = found->skipped;
  const auto owner = entry.record.lock();
  report.culprit = culprit_text(report.stats, found->same_names,
                                owner != nullptr ? owner->parameters : std::vector<Parameter>{});
  if (report.skip == Skip::kUnscaleOverflow) {
    report.culprit = describe_unscaling(report.stats.amax, report.scale);
  }
  return report;
}

// Alarms are raised here, too: a training loop that replays CUDA graphs calls nothing else.
std::optional<StepReport> Scaler::report_of(uint64_t optimizer, bool wait) const {
  const auto found = optimizers.find(optimizer);
  const bool any = found != optimizers.end() &&
                   (found->second.report.steps > 0 || found->second.cuda != nullptr);
  require(any || !wait, ErrorCode::kWrongOrder,
          "report() was called before any step(), or after its optimizer was destroyed.");
  if (!any) return std::nullopt;
  if (!on_device()) return found->second.report;
  if (wait) cuda_wait(options.device.index);
  std::optional<StepReport> report = report_from_device(found->second);
  raise_device_alarms();
  return report;
}

}  // namespace internal
}  // namespace headroom
