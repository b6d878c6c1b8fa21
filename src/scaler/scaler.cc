// scaler/ walks the other stations in order and keeps that order; it knows no kernels.
#include <headroom/scaler.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace headroom {
namespace {

using internal::number;
using internal::require;

std::vector<TensorView> grads_of(const Optimizer& optimizer) {
  std::vector<TensorView> grads;
  grads.reserve(optimizer.parameters().size());
  for (const Parameter& parameter : optimizer.parameters()) grads.push_back(parameter.grad);
  return grads;
}

std::vector<TensorView> memory_of(const Optimizer& optimizer) {
  std::vector<TensorView> memory;
  for (const Parameter& parameter : optimizer.parameters()) {
    for (const TensorView& view : {parameter.weight, parameter.grad}) {
      if (view.count > 0) memory.push_back(view);
    }
  }
  std::sort(memory.begin(), memory.end(),
            [](const TensorView& a, const TensorView& b) { return a.data < b.data; });
  return memory;
}

// Both sorted by address and free of overlaps within.
bool share_memory(const std::vector<TensorView>& a, const std::vector<TensorView>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (internal::overlap(a[i], b[j])) return true;
    (a[i].data < b[j].data ? i : j) += 1;
  }
  return false;
}

StepReport make_report(const Verdict& verdict, const GradStats& stats, float scale,
                       std::string culprit) {
  StepReport report;
  report.applied = verdict.apply();
  report.skip = verdict.skip;
  report.scale = scale;
  report.grad_norm = verdict.grad_norm;
  report.clip_factor = verdict.clip_factor;
  report.stats = stats;
  report.culprit = std::move(culprit);
  return report;
}

}  // namespace

std::string StepReport::to_string() const {
  if (applied) {
    std::string text = "applied at scale " + number(scale) + ": norm " + number(grad_norm);
    if (clip_factor < 1.0) text += ", clipped by " + number(clip_factor);
    return text;
  }
  const std::string text = "skipped at scale " + number(scale) + ": ";
  if (skip == Skip::kUnscaleOverflow) {
    return text + "the unscaled gradient would overflow (largest " + number(stats.amax) + ")";
  }
  return text + culprit;
}

GradScaler::GradScaler(const ScalePolicy& policy, ScalerOptions options)
    : policy_(policy), options_(std::move(options)) {
  validate(policy_);
  state_ = initial_state(policy_);
}

float GradScaler::get_scale() const { return enabled() ? state_.scale : 1.0f; }

float GradScaler::scale(float loss) {
  if (!enabled()) return loss;
  used_scale_ = state_.scale;
  unused_losses_ = true;
  return loss * state_.scale;
}

// Checks that `call` may be made now for this optimizer.
GradScaler::Round& GradScaler::enter(const Optimizer& optimizer, const char* call, bool unscaling) {
  require(used_scale_ > 0.0f, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called before any scale(); scale the loss, run backward on " +
           "the result, then step.";
  });
  check_apart(optimizer);
  Round& round = round_[*optimizer.identity_];
  require(round.stage != Stage::kStepped, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called after step() for this optimizer; call update() first.";
  });
  require(!unscaling || round.stage == Stage::kReady, ErrorCode::kWrongOrder, [] {
    return "unscale_() was already called for this optimizer since the last update(); unscale " +
           std::string("once, just before clipping.");
  });
  return round;
}

// A parameter in two optimizers would be unscaled and updated twice.
void GradScaler::check_apart(const Optimizer& optimizer) {
  const auto known = known_.find(*optimizer.identity_);
  if (known != known_.end() && known->second.revision == optimizer.revision_) return;
  std::vector<TensorView> memory = memory_of(optimizer);
  std::erase_if(known_, [](const auto& entry) { return entry.second.identity.expired(); });
  for (const auto& [id, other] : known_) {
    require(id == *optimizer.identity_ || !share_memory(memory, other.memory),
            ErrorCode::kInvalidArgument, [] {
              return "A parameter of this optimizer belongs to another optimizer under the same "
                     "scaler too; give each parameter to one optimizer only.";
            });
  }
  known_[*optimizer.identity_] = {optimizer.identity_, optimizer.revision_, std::move(memory)};
}

void GradScaler::record(bool overflow, const std::string& culprit) {
  unused_losses_ = false;
  recorded_ = true;
  overflow_ = overflow_ || overflow;
  if (overflow) culprit_ = culprit;
}

UnscaleResult GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled()) return {};
  Round& round = enter(optimizer, "unscale_()", true);
  UnscaleResult result = headroom::unscale_(grads_of(optimizer), inverse(used_scale_));
  round.stage = Stage::kUnscaled;
  round.overflow = !result.ok();
  round.culprit = describe_culprit(result.before, optimizer.parameters());
  record(round.overflow, round.culprit);
  return result;
}

StepReport GradScaler::step(Optimizer& optimizer, const StepOptions& options) {
  require(options.max_norm >= 0.0f && std::isfinite(options.max_norm), ErrorCode::kInvalidArgument,
          [&] {
            return "max_norm is " + number(options.max_norm) +
                   "; it has to be a finite number above 0, or 0 for no clipping.";
          });
  Round without_stages;
  Round& round = enabled() ? enter(optimizer, "step()", false) : without_stages;
  const float used = enabled() ? used_scale_ : 1.0f;
  const float scale = round.stage == Stage::kUnscaled ? 1.0f : used;

  const GradStats stats = measure(grads_of(optimizer));
  Verdict verdict = decide(stats.finite(), stats.norm(), stats.amax, scale, options.max_norm);
  std::string culprit = describe_culprit(stats, optimizer.parameters());
  if (round.overflow) {
    verdict.skip = Skip::kNotFinite;
    culprit = round.culprit;
  }

  if (verdict.apply()) {
    optimizer.apply(verdict.multiplier, options.clear_grads == ClearGrads::kAlways);
  } else {
    if (options.clear_grads != ClearGrads::kNever) optimizer.zero_grad();
    optimizer.skipped(culprit);
  }
  StepReport report = make_report(verdict, stats, used, std::move(culprit));
  round.stage = Stage::kStepped;
  if (enabled()) record(!report.applied, report.culprit);
  require(report.applied || policy_.on_overflow == OnOverflow::kSkip, ErrorCode::kOverflow, [&] {
    return "The step was " + report.to_string() +
           "; the weights are as before. Lower the scale, or use a dynamic one.";
  });
  return report;
}

void GradScaler::update() {
  if (!enabled()) return;
  require(used_scale_ > 0.0f, ErrorCode::kWrongOrder, [] {
    return "update() was called before any scale(); scale a loss, run backward, step, then update.";
  });
  require(recorded_, ErrorCode::kWrongOrder, [] {
    return "update() was called but no optimizer was stepped or unscaled since the last one; call "
           "step() first.";
  });
  require(!unused_losses_, ErrorCode::kWrongOrder, [] {
    return "update() was called while gradients wait that no step has used; with micro-batches, "
           "step and update once after the last, or use a GradAccumulator.";
  });
  const Transition next = next_state(policy_, state_, overflow_);
  state_ = next.state;
  open_round();
  if (next.alarm != Alarm::kNone) raise(next.alarm);
}

void GradScaler::update(float new_scale) {
  if (!enabled()) return;
  require(!unused_losses_, ErrorCode::kWrongOrder, [] {
    return "The scale cannot be set while gradients wait that were made with the old one; step "
           "first.";
  });
  require(new_scale >= policy_.min_scale && new_scale <= policy_.max_scale,
          ErrorCode::kInvalidArgument, [&] {
            return "A scale of " + number(new_scale) + " cannot be set; the policy allows " +
                   number(policy_.min_scale) + " to " + number(policy_.max_scale) + ".";
          });
  ScaleState state = initial_state(policy_);
  state.scale = new_scale;
  state.pending = new_scale;
  state.steps = state_.steps;
  state.skipped = state_.skipped;
  state_ = state;
  open_round();
}

void GradScaler::open_round() {
  round_.clear();
  recorded_ = false;
  overflow_ = false;
  unused_losses_ = false;
}

void GradScaler::raise(Alarm alarm) const {
  AlarmReport report;
  report.alarm = alarm;
  report.scale = state_.scale;
  report.skips_in_row = state_.skips_in_row;
  report.culprit = culprit_;
  const std::string skips = std::to_string(state_.skips_in_row) + " steps in a row were skipped";
  report.sentence = alarm == Alarm::kAtFloor
                        ? "The gradients overflowed at a scale of " + number(state_.scale) +
                              " and the policy allows none smaller (min_scale " +
                              number(policy_.min_scale) + "); " + skips
                        : skips + ", the limit, at a scale of " + number(state_.scale);
  report.sentence += ". The last culprit was " +
                     (culprit_.empty() ? std::string("not named") : culprit_) +
                     ". Scaling cannot help here: look for inf or nan in the data or the forward "
                     "pass, lower the learning rate, or use bf16.";
  if (!options_.on_alarm) throw Error(ErrorCode::kScaleCollapsed, report.sentence);
  options_.on_alarm(report);
}

}  // namespace headroom
