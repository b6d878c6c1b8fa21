// GradScaler where the scale lives on a CUDA device: the host keeps the order of calls and nothing
// else.
#include <headroom/scaler.h>

#include <cstring>

#include "core/check.h"
#include "core/float_environment.h"
#include "scaler/cuda.h"

namespace headroom {

using internal::number;
using internal::require;

void GradScaler::scale(const TensorView& loss, const TensorView& scaled) {
  internal::check_view(loss, internal::Access::kRead, [] { return std::string("The loss"); });
  internal::check_view(scaled, internal::Access::kWrite,
                       [] { return std::string("The scaled loss"); });
  const auto same = [](const Device& a, const Device& b) {
    return a.type == b.type && (a.type == DeviceType::kCPU || a.index == b.index);
  };
  require(scaled.dtype == DType::kF32 && loss.dtype != DType::kF64 && loss.count == scaled.count &&
              same(loss.device, scaled.device),
          ErrorCode::kMismatch, [] {
            return "scale() needs a loss of f16, bf16 or f32 and an f32 tensor of the same size on "
                   "the same device for the result.";
          });
  require(cuda_ == nullptr || !enabled() || same(loss.device, options_.device),
          ErrorCode::kMismatch,
          [] { return "The loss is not on the CUDA device where this scaler's scale is."; });
  require(loss.data == scaled.data ? loss.dtype == DType::kF32 : !internal::overlap(loss, scaled),
          ErrorCode::kInvalidArgument, [] {
            return "The loss and the scaled loss share memory in part; give the result its own.";
          });
  if (enabled() && cuda_ != nullptr) {
    cuda_->scale(loss, scaled);
    used_scale_ = 1.0f;  // the true one is on the device
    ++losses_;
    return;
  }
  const float factor = enabled() ? scale(1.0f) : 1.0f;
  if (loss.device.type == DeviceType::kCUDA) {
    internal::cuda_scale(loss, factor, scaled);
    return;
  }
  const internal::DefaultFloatEnvironment environment;
  if (loss.data != scaled.data) convert(loss, scaled);
  auto* const out = static_cast<char*>(scaled.data);  // of any alignment
  for (int64_t i = 0; i < scaled.count; ++i) {
    float value = 0.0f;
    memcpy(&value, out + i * sizeof(float), sizeof(float));
    value *= factor;
    memcpy(out + i * sizeof(float), &value, sizeof(float));
  }
}

// Tells the device where the gradients are.
void GradScaler::enqueue_list(const Optimizer& optimizer, Known* known) const {
  if (known->listed == optimizer.identity_->revision) return;
  std::vector<TensorView> grads;
  grads.reserve(optimizer.parameters().size());
  for (const Parameter& parameter : optimizer.parameters()) {
    const TensorView& grad = parameter.grad;
    const bool there =
        grad.device.type == DeviceType::kCUDA && grad.device.index == options_.device.index;
    require(there || grad.count == 0, ErrorCode::kMismatch, [&] {
      return "The gradient of parameter '" + parameter.name +
             "' is not on the CUDA device where this scaler's scale is; use a scaler on the CPU "
             "for gradients in several places.";
    });
    grads.push_back(grad);
  }
  if (known->cuda == nullptr) {
    known->cuda = std::make_shared<internal::CudaOptimizer>(options_.device.index);
  }
  known->cuda->measure.set_list(grads);
  known->listed = optimizer.identity_->revision;
}

internal::CudaOrder GradScaler::order(Known* known) const {
  internal::CudaOrder order;
  order.enabled = enabled();
  order.first = known->first;
  order.fresh = known->fresh;
  order.current = losses_ > losses_before_;
  order.unscaled = known->stage == Stage::kUnscaled;
  known->first = false;
  known->fresh = false;
  return order;
}

internal::CudaRanks GradScaler::ranks(const Optimizer& optimizer, Known* known,
                                      const StepOptions* step) const {
  if (options_.ranks == nullptr) return {};
  return {options_.ranks.get(), stand(optimizer, known, step)};
}

StepReport GradScaler::step_on_device(Optimizer& optimizer, const StepOptions& options,
                                      Known* known) {
  enqueue_list(optimizer, known);
  known->cuda->measure.enqueue({});  // while it runs, the host looks after the rest
  internal::ApplyJob job{options.clear_grads == ClearGrads::kAlways, false};
  internal::CudaApply* const side = optimizer.cuda_side(options_.device.index, &job);
  internal::CudaOrder order = this->order(known);
  order.max_norm = options.max_norm;
  order.outside_scale = options.outside_scale;
  order.outside_found = options.outside_found;
  order.tell_skipped = options.tell_skipped;
  cuda_->decide(order, side != nullptr ? side->tables() : internal::CudaTables{},
                ranks(optimizer, known, &options), known->cuda.get());
  const bool clear_skipped = options.clear_grads != ClearGrads::kNever;
  StepReport report;
  report.pending = side != nullptr;
  if (side != nullptr) {
    side->step(job, clear_skipped);
  } else {
    internal::cuda_wait(options_.device.index);
    report = *report_from_device(*known);
    const float scale = order.unscaled ? 1.0f : report.scale;
    if (report.applied && beyond_its_format(optimizer, options, scale)) {
      report.applied = false;
      report.skip = Skip::kUnscaleOverflow;
      report.culprit = internal::describe_unscaling_in_place(report.stats.amax, scale);
    }
    known->report = report;  // names may be gone when somebody asks
    if (report.applied) {
      optimizer.apply(known->cuda->reports.read()->verdict.multiplier, job.clear_grads);
    } else {
      optimizer.skipped(report.culprit);
      if (clear_skipped) optimizer.zero_grad();
    }
  }
  last_stepped_ = optimizer.identity_->id;
  if (enabled()) {
    known->stage = Stage::kStepped;
    record(false, "", known);
  }
  return report;
}

void GradScaler::update_on_device() {
  cuda_->update();
  for (auto& [id, known] : known_) {
    const auto identity = known.identity.lock();
    const Waiting waits = waiting(known);
    if (identity == nullptr || known.cuda == nullptr || waits == Waiting::kNone) continue;
    enqueue_list(*identity->owner, &known);
    cuda_->rescale(waits == Waiting::kUnscaled, known.cuda.get());
    known.goes_on(known.scale);  // the true one is on the device
  }
  next_round();
  tell_alarms();
}

void GradScaler::tell_alarms() const {
  if (cuda_ == nullptr) return;
  if (cuda_->differences.latest() != differences_told_) {
    differences_told_ = cuda_->differences.latest();
    const internal::CudaDifference found = *cuda_->differences.read();
    throw Error(ErrorCode::kRanksDiffer,
                internal::differ_sentence(found.which, found.low, found.high));
  }
  if (cuda_->alarms.latest() == alarms_told_) return;
  alarms_told_ = cuda_->alarms.latest();
  const internal::CudaAlarm alarm = *cuda_->alarms.read();
  const auto found = known_.find(last_stepped_);
  const auto report = found != known_.end() ? report_from_device(found->second) : std::nullopt;
  raise(alarm.alarm, alarm.scale, alarm.skips_in_row, report ? report->culprit : "");
}

std::optional<StepReport> GradScaler::report_from_device(const Known& known) const {
  const auto found = known.cuda != nullptr ? known.cuda->reports.read() : std::nullopt;
  if (!found) return std::nullopt;
  if (found->steps == known.report.steps) return known.report;
  StepReport report;
  report.applied = found->verdict.apply();
  report.skip = found->verdict.skip;
  report.scale = found->scale;
  report.grad_norm = found->verdict.grad_norm;
  report.clip_factor = found->verdict.clip_factor;
  const internal::CudaOrigin& origin = found->origin;
  const int64_t count = origin.count >= 0 ? origin.count : known.cuda->measure.count();
  report.stats = partial_of(found->stats, count).stats;
  report.steps = found->steps;
  report.skipped = found->skipped;
  const auto identity = known.identity.lock();
  report.culprit_rank = origin.culprit_rank;
  report.culprit =
      culprit_text(report.stats, origin.culprit_rank, origin.same_list,
                   identity != nullptr ? identity->owner->parameters() : std::vector<Parameter>{});
  if (report.skip == Skip::kUnscaleOverflow) {
    report.culprit = internal::describe_unscaling(report.stats.amax, report.scale);
  }
  return report;
}

std::optional<StepReport> GradScaler::report_of(uint64_t optimizer, bool wait) const {
  const auto found = known_.find(optimizer);
  const bool any =
      found != known_.end() && (found->second.report.steps > 0 || found->second.cuda != nullptr);
  require(any || !wait, ErrorCode::kWrongOrder, [] {
    return "report() was called before any step(), or after its optimizer was destroyed.";
  });
  if (!any) return std::nullopt;
  if (cuda_ == nullptr) return found->second.report;
  if (wait) internal::cuda_wait(options_.device.index);
  std::optional<StepReport> report = report_from_device(found->second);
  tell_alarms();
  return report;
}

StepReport GradScaler::report() const { return report_of(last_stepped_, true).value(); }
StepReport GradScaler::report(const Optimizer& optimizer) const {
  return report_of(id_of(optimizer), true).value();
}
std::optional<StepReport> GradScaler::try_report() const { return report_of(last_stepped_, false); }
std::optional<StepReport> GradScaler::try_report(const Optimizer& optimizer) const {
  return report_of(id_of(optimizer), false);
}

}  // namespace headroom
