// scaler/ walks the other stations in order and keeps that order; it knows no kernels.
#include <headroom/scaler.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/float_environment.h"

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

bool has_gradient(const Optimizer& optimizer) {
  return std::any_of(optimizer.parameters().begin(), optimizer.parameters().end(),
                     [](const Parameter& parameter) { return parameter.grad.data != nullptr; });
}

// Names the first tensor whose unscaled values leave FP32's range.
std::string unscale_culprit(const Optimizer& optimizer, float scale) {
  for (const Parameter& parameter : optimizer.parameters()) {
    const double amax = measure({parameter.grad}).amax;
    if (decide(true, amax, amax, scale, 0.0).apply()) continue;
    return parameter.name + ": " + number(amax) + " / " + number(scale) + " is beyond FP32";
  }
  return "";
}

// Brings gradients that were made with one scale to another.
void rescale(const Optimizer& optimizer, float from, float to) {
  const double ratio = static_cast<double>(to) / static_cast<double>(from);
  headroom::unscale_(grads_of(optimizer),
                     static_cast<float>(std::clamp<double>(ratio, kSmallestScale, kLargestScale)));
}

}  // namespace

std::string StepReport::to_string() const {
  if (applied) {
    std::string text = "applied at scale " + number(scale) + ": norm " + number(grad_norm);
    if (clip_factor < 1.0) text += ", clipped by " + number(clip_factor);
    return text;
  }
  return "skipped at scale " + number(scale) + ": " + culprit;
}

GradScaler::GradScaler(const ScalePolicy& policy, ScalerOptions options)
    : policy_(policy), options_(std::move(options)) {
  validate(policy_);
  state_ = initial_state(policy_);
}

void GradScaler::set_policy(const ScalePolicy& policy) {
  validate(policy);
  require(allows(policy, state_.scale) && allows(policy, state_.pending),
          ErrorCode::kInvalidArgument, [&] {
            return "The scale is " + number(state_.scale) + ", but the new policy allows " +
                   number(policy.min_scale) + " to " + number(policy.max_scale) + " only.";
          });
  policy_ = policy;
  if (!policy_.late) state_.pending = state_.scale;
  state_.growth_tracker = std::min(state_.growth_tracker, policy_.growth_interval - 1);
  state_.delay_left = std::min(state_.delay_left, policy_.hysteresis);
}

float GradScaler::get_scale() const { return enabled() ? state_.scale : 1.0f; }

float GradScaler::scale(float loss) {
  if (!enabled()) return loss;
  const internal::DefaultFloatEnvironment environment;
  used_scale_ = state_.scale;
  ++losses_;
  return loss * state_.scale;
}

// Looks the optimizer up, and checks that no other one under this scaler has its memory: a
// parameter in two would be unscaled and updated twice.
GradScaler::Known& GradScaler::know(const Optimizer& optimizer) {
  require(optimizer.identity_ != nullptr, ErrorCode::kInvalidArgument, [] {
    return "This optimizer was moved from and is empty; use the one it was moved to.";
  });
  const internal::OptimizerIdentity& identity = *optimizer.identity_;
  const auto found = known_.find(identity.id);
  if (found != known_.end() && found->second.revision == identity.revision) return found->second;
  std::vector<TensorView> memory = memory_of(optimizer);
  std::erase_if(known_, [](const auto& entry) { return entry.second.identity.expired(); });
  for (const auto& [id, other] : known_) {
    const bool stale = other.identity.lock()->revision != other.revision;
    const bool shared =
        share_memory(memory, stale ? memory_of(*other.identity.lock()->owner) : other.memory);
    require(id == identity.id || !shared, ErrorCode::kInvalidArgument, [] {
      return "A parameter of this optimizer belongs to another optimizer under the same scaler "
             "too; give each parameter to one optimizer only.";
    });
  }
  Known& known = known_[identity.id];
  if (known.revision == 0) known.scale = used_scale_;  // seen for the first time
  known.identity = optimizer.identity_;
  known.revision = identity.revision;
  known.memory = std::move(memory);
  return known;
}

// Checks that `call` may be made now for this optimizer.
GradScaler::Known& GradScaler::enter(const Optimizer& optimizer, const char* call) {
  require(used_scale_ > 0.0f, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called before any scale(); scale the loss, run backward on " +
           "the result, then step.";
  });
  Known& known = know(optimizer);
  if (known.round != round_) {
    // Gradients that were unscaled but not stepped stay unscaled until the next loss.
    const bool still_unscaled = known.stage == Stage::kUnscaled && known.losses == losses_;
    if (!still_unscaled) {
      known.stage = Stage::kReady;
      known.overflow = false;
      known.amax = 0.0;
      known.culprit.clear();
    }
    known.round = round_;
  }
  require(known.stage != Stage::kStepped, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called after step() for this optimizer; call update() first.";
  });
  if (losses_ > losses_before_) known.scale = state_.scale;
  return known;
}

void GradScaler::record(bool overflow, const std::string& culprit, Known* known) {
  known->losses = losses_;
  losses_used_ = losses_;
  recorded_ = true;
  seen_.overflow = seen_.overflow || overflow;
  // Gradients of an earlier round may have an earlier scale.
  const double amax = known->amax / static_cast<double>(known->scale);
  seen_.amax = std::max(seen_.amax, amax * static_cast<double>(state_.scale));
  if (overflow) culprit_ = culprit;
}

UnscaleResult GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled()) return {};
  const internal::DefaultFloatEnvironment environment;
  Known& known = enter(optimizer, "unscale_()");
  require(known.stage == Stage::kReady, ErrorCode::kWrongOrder, [] {
    return "unscale_() was already called for this optimizer and its gradients are unscaled; " +
           std::string("unscale once, just before clipping.");
  });
  UnscaleResult result = headroom::unscale_(grads_of(optimizer), inverse(known.scale));
  known.stage = Stage::kUnscaled;
  known.overflow = !result.ok();
  known.amax = result.before.amax;
  known.culprit = describe_culprit(result.before, optimizer.parameters());
  record(known.overflow, known.culprit, &known);
  return result;
}

StepReport GradScaler::step(Optimizer& optimizer, const StepOptions& options) {
  const internal::DefaultFloatEnvironment environment;
  require(options.max_norm >= 0.0f && std::isfinite(options.max_norm), ErrorCode::kInvalidArgument,
          [&] {
            return "max_norm is " + number(options.max_norm) +
                   "; it has to be a finite number above 0, or 0 for no clipping.";
          });
  require(has_gradient(optimizer), ErrorCode::kWrongOrder, [] {
    return "step() was called for an optimizer none of whose parameters has a gradient; set them, "
           "or do not step it.";
  });
  Known disabled;
  disabled.scale = 1.0f;
  Known& known = enabled() ? enter(optimizer, "step()") : disabled;
  const float scale = known.stage == Stage::kUnscaled ? 1.0f : known.scale;

  const GradStats stats = measure(grads_of(optimizer));
  Verdict verdict = decide(stats.finite(), stats.norm(), stats.amax, scale, options.max_norm);
  std::string culprit = describe_culprit(stats, optimizer.parameters());
  if (known.overflow) {
    verdict.skip = Skip::kNotFinite;
    if (!known.culprit.empty()) culprit = known.culprit;
  }
  if (verdict.skip == Skip::kUnscaleOverflow) culprit = unscale_culprit(optimizer, scale);

  if (verdict.apply()) {
    optimizer.apply(verdict.multiplier, options.clear_grads == ClearGrads::kAlways);
  } else {
    if (options.clear_grads != ClearGrads::kNever) optimizer.zero_grad();
    optimizer.skipped(culprit);
  }
  StepReport report;
  report.applied = verdict.apply();
  report.skip = verdict.skip;
  report.scale = known.scale;
  report.grad_norm = verdict.grad_norm;
  report.clip_factor = verdict.clip_factor;
  report.stats = stats;
  report.culprit = std::move(culprit);
  if (known.stage != Stage::kUnscaled) known.amax = stats.amax;
  known.stage = Stage::kStepped;
  if (enabled()) record(!report.applied, report.culprit, &known);
  require(report.applied || policy_.on_overflow == OnOverflow::kSkip, ErrorCode::kOverflow, [&] {
    return "The step was " + report.to_string() +
           "; the weights are as before. Lower the scale, or use a dynamic one.";
  });
  return report;
}

void GradScaler::update() {
  if (!enabled()) return;
  const internal::DefaultFloatEnvironment environment;
  require(used_scale_ > 0.0f, ErrorCode::kWrongOrder, [] {
    return "update() was called before any scale(); scale a loss, run backward, step, then update.";
  });
  require(recorded_, ErrorCode::kWrongOrder, [] {
    return "update() was called but no optimizer was stepped or unscaled since the last one; call "
           "step() first. With micro-batches, update once, after the step.";
  });
  const Transition next = next_state(policy_, state_, seen_);
  move_to(next.state);
  if (next.alarm != Alarm::kNone) raise(next.alarm);
}

void GradScaler::update(float new_scale) {
  if (!enabled()) return;
  check_no_waiting("update(new_scale)");
  require(allows(policy_, new_scale), ErrorCode::kInvalidArgument, [&] {
    return "A scale of " + number(new_scale) + " cannot be set; the policy allows " +
           number(policy_.min_scale) + " to " + number(policy_.max_scale) + ".";
  });
  ScaleState state = initial_state(policy_);
  state.scale = new_scale;
  state.pending = new_scale;
  state.steps = state_.steps;
  state.skipped = state_.skipped;
  move_to(state);
}

void GradScaler::discard() {
  losses_used_ = losses_;
  for (auto& [id, known] : known_) known.losses = losses_;
}

void GradScaler::check_no_waiting(const char* call) const {
  require(losses_ == losses_used_, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called while gradients wait that were made with another " +
           "scale; step first, or drop them and call discard().";
  });
}

// Takes the next scale, and takes the gradients along that still wait under known optimizers.
void GradScaler::move_to(const ScaleState& next) {
  for (auto& [id, known] : known_) {
    const auto identity = known.identity.lock();
    if (identity == nullptr || known.losses == losses_ || next.scale == state_.scale) continue;
    rescale(*identity->owner, state_.scale, next.scale);
    known.scale = next.scale;
  }
  state_ = next;
  ++round_;
  losses_before_ = losses_;
  recorded_ = false;
  seen_ = StepSeen{};
}

void GradScaler::raise(Alarm alarm) const {
  AlarmReport report;
  report.alarm = alarm;
  report.scale = state_.scale;
  report.skips_in_row = state_.skips_in_row;
  report.culprit = culprit_;
  const std::string skips = state_.skips_in_row == 1 ? "1 step was skipped"
                                                     : std::to_string(state_.skips_in_row) +
                                                           " steps in a row were skipped";
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
