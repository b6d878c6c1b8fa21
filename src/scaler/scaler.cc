// scaler/ walks the other stations in order and keeps that order; it knows no kernels.
#include <headroom/accumulate.h>
#include <headroom/scaler.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "apply/checks.h"
#include "core/check.h"
#include "core/float_environment.h"
#include "measure/bound.h"
#include "scaler/cuda.h"

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

// Names the first tensor whose unscaled values leave FP32's range.
std::string unscale_culprit(const Optimizer& optimizer, float scale) {
  for (const Parameter& parameter : optimizer.parameters()) {
    const double amax = internal::measure_bound({parameter.grad}).amax;
    if (decide(true, amax, amax, scale, 0.0).apply()) continue;
    return parameter.name + ": " + internal::describe_unscaling(amax, scale);
  }
  return "";
}

std::string scales_of(const ScalePolicy& policy) {
  return (policy.grad_limit > 0.0f ? "powers of two from " : "") + number(policy.min_scale) +
         " to " + number(policy.max_scale);
}

// Brings gradients that were made with one scale to another.
void rescale(const Optimizer& optimizer, float from, float to) {
  const double ratio = static_cast<double>(to) / static_cast<double>(from);
  internal::unscale_bound(grads_of(optimizer), static_cast<float>(std::clamp<double>(
                                                   ratio, kSmallestScale, kLargestScale)));
}

}  // namespace

std::string internal::describe_unscaling(double amax, float scale) {
  if (!usable(scale)) return "a scale of " + number(scale) + " cannot be divided by";
  const std::string quotient = number(amax) + " / " + number(scale) + " is beyond ";
  const bool fits = amax / static_cast<double>(scale) <= std::numeric_limits<float>::max();
  return quotient + (fits ? "2^63, the largest that a step is made with" : "FP32");
}

std::string internal::describe_unscaling_in_place(double amax, float scale) {
  return number(amax) + " / " + number(scale) + " is beyond FP16, in which it is unscaled";
}

std::string StepReport::to_string() const {
  if (pending) return "pending: not known yet; call report() or try_report()";
  if (applied) {
    std::string text = "applied at scale " + number(scale) + ": norm " + number(grad_norm);
    if (clip_factor < 1.0) text += ", clipped by " + number(clip_factor);
    return text;
  }
  return "skipped at scale " + number(scale) + ": " + culprit;
}

GradScaler::GradScaler(const ScalePolicy& policy, ScalerOptions options)
    : policy_(policy), options_(std::move(options)) {
  check(policy_);
  state_ = initial_state(policy_);
  check_ranks();
  if (options_.device.type == DeviceType::kCPU) return;
  cuda_ = std::make_shared<internal::CudaScaler>(options_.device.index);
  cuda_->set_state(policy_, state_);
}

GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

const ScaleState& GradScaler::state() const {
  if (cuda_ != nullptr) state_ = cuda_->wait_state();
  return state_;
}

// Throws unless this scaler can follow the policy.
void GradScaler::check(const ScalePolicy& policy) const {
  validate(policy);
  const bool waits = policy.on_overflow != OnOverflow::kSkip;
  require(!waits || options_.device.type == DeviceType::kCPU, ErrorCode::kInvalidArgument, [] {
    return "OnOverflow::kThrow needs the host to wait for every verdict; use it with a scaler on "
           "the CPU, or on_alarm with max_skips_in_row.";
  });
}

void GradScaler::set_policy(const ScalePolicy& policy) {
  check(policy);
  state();
  require(allows(policy, state_.scale) && allows(policy, state_.pending),
          ErrorCode::kInvalidArgument, [&] {
            return "The scale is " + number(state_.scale) + ", but the new policy allows " +
                   scales_of(policy) + " only.";
          });
  policy_ = policy;
  if (!policy_.late) state_.pending = state_.scale;
  state_.growth_tracker = std::clamp(
      state_.growth_tracker, -std::max(policy_.first_growth_extra, policy_.next_growth_extra),
      policy_.growth_interval - 1);
  state_.delay_left = std::min(state_.delay_left, policy_.hysteresis);
  if (cuda_ != nullptr) cuda_->set_state(policy_, state_);
}

float GradScaler::get_scale() const { return enabled() ? state().scale : 1.0f; }

float GradScaler::scale(float loss) {
  if (!enabled()) return loss;
  require(cuda_ == nullptr, ErrorCode::kUnsupported, [] {
    return "This scaler's scale is on a CUDA device; call scale(loss, scaled) with tensors there.";
  });
  const internal::DefaultFloatEnvironment environment;
  used_scale_ = state_.scale;
  ++losses_;
  return loss * state_.scale;
}

uint64_t GradScaler::id_of(const Optimizer& optimizer) {
  internal::check_whole(optimizer.identity_ != nullptr);
  return optimizer.identity_->id;
}

bool GradScaler::has_gradient(const Optimizer& optimizer) {
  return std::any_of(optimizer.parameters().begin(), optimizer.parameters().end(),
                     [](const Parameter& parameter) { return parameter.grad.data != nullptr; });
}

// Looks the optimizer up.
GradScaler::Known& GradScaler::meet(const Optimizer& optimizer) {
  const uint64_t id = id_of(optimizer);
  const auto found = known_.find(id);
  if (found != known_.end()) return found->second;
  std::erase_if(known_, [](const auto& entry) { return entry.second.identity.expired(); });
  Known& known = known_[id];
  known.identity = optimizer.identity_;
  known.ordinal = met_++;
  return known;
}

// The same, and checks that no other one under this scaler has its memory: a
// parameter in two would be unscaled and updated twice.
GradScaler::Known& GradScaler::know(const Optimizer& optimizer) {
  const auto found = known_.find(id_of(optimizer));
  const internal::OptimizerIdentity& identity = *optimizer.identity_;
  if (found != known_.end() && found->second.revision == identity.revision) return found->second;
  std::vector<TensorView> memory = memory_of(optimizer);
  for (const auto& [id, other] : known_) {
    if (other.identity.expired() || id == identity.id) continue;
    const bool stale = other.identity.lock()->revision != other.revision;
    const bool shared =
        share_memory(memory, stale ? memory_of(*other.identity.lock()->owner) : other.memory);
    require(!shared, ErrorCode::kInvalidArgument, [] {
      return "A parameter of this optimizer belongs to another optimizer under the same scaler "
             "too; give each parameter to one optimizer only.";
    });
  }
  Known& known = meet(optimizer);                      // one that is refused leaves nothing behind
  if (known.revision == 0) known.scale = used_scale_;  // seen for the first time
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
  if (known.round != round_) known.begin(round_);
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
  // Without gradients there is nothing to tell update().
  const bool looked = has_gradient(optimizer) || options_.ranks != nullptr;
  if (cuda_ != nullptr) {
    enqueue_list(optimizer, &known);
    cuda_->unscale(order(&known), ranks(optimizer, &known, nullptr), known.cuda.get());
    known.stage = Stage::kUnscaled;
    if (looked) record(false, "", &known);
    return {};
  }
  const UnscaleResult here = internal::unscale_bound(grads_of(optimizer), inverse(known.scale));
  known.stage = Stage::kUnscaled;
  const Finding found =
      agree(optimizer, &known, nullptr, {here.before, here.new_inf, here.new_zeros, "", -1});
  const UnscaleResult result{found.stats, found.new_inf, found.new_zeros};
  known.overflow = !result.ok();
  known.amax = result.before.amax;
  known.culprit = found.culprit;
  known.culprit_rank = found.culprit_rank;
  if (looked) record(known.overflow, known.culprit, &known);
  return result;
}

// Checks that step() may be called so, now.
GradScaler::Known& GradScaler::enter_step(const Optimizer& optimizer, const StepOptions& options) {
  require(options.max_norm >= 0.0f && std::isfinite(options.max_norm), ErrorCode::kInvalidArgument,
          [&] {
            return "max_norm is " + number(options.max_norm) +
                   "; it has to be a finite number above 0, or 0 for no clipping.";
          });
  const bool outside = options.outside_scale != nullptr || options.outside_found != nullptr ||
                       options.tell_skipped != nullptr;
  require(!outside || (!enabled() && options_.ranks == nullptr), ErrorCode::kInvalidArgument, [] {
    return "outside_scale, outside_found and tell_skipped are for a disabled scaler without ranks; "
           "this one has a scale of its own, or ranks that know nothing of them.";
  });
  id_of(optimizer);  // one that was moved from has no gradients, but that is not what is wrong
  require(has_gradient(optimizer) || options_.ranks != nullptr, ErrorCode::kWrongOrder, [] {
    return "step() was called for an optimizer none of whose parameters has a gradient; set them, "
           "or do not step it.";
  });
  if (!enabled()) return meet(optimizer);
  Known& known = enter(optimizer, "step()");
  if (policy_.rerun) check_rerun(optimizer);
  return known;
}

// Of a batch that is run again nothing may have been applied, and nothing be added up.
void GradScaler::check_rerun(const Optimizer& optimizer) const {
  const bool another = std::any_of(known_.begin(), known_.end(), [&](const auto& entry) {
    return entry.second.stage == Stage::kStepped && entry.second.round == round_;
  });
  require(!another, ErrorCode::kUnsupported, [] {
    return "A second optimizer was stepped in one round under a policy that runs batches again, "
           "where the first would be stepped once more; put all parameters into one optimizer, "
           "or take the preset 'headroom'.";
  });
  require(dynamic_cast<const GradAccumulator*>(&optimizer) == nullptr, ErrorCode::kUnsupported, [] {
    return "A GradAccumulator was stepped under a policy that runs batches again, but a pass that "
           "overflows spoils its sums for good; take the preset 'headroom'.";
  });
}

StepReport GradScaler::step(Optimizer& optimizer, const StepOptions& options) {
  const internal::DefaultFloatEnvironment environment;
  Known& known = enter_step(optimizer, options);
  if (cuda_ != nullptr) return step_on_device(optimizer, options, &known);
  if (!enabled()) known.scale = options.outside_scale != nullptr ? *options.outside_scale : 1.0f;
  const float scale = known.stage == Stage::kUnscaled ? 1.0f : known.scale;

  const int64_t beyond = beyond_its_format(optimizer, options, scale) ? 1 : 0;
  Finding found = agree(optimizer, &known, &options,
                        {internal::measure_bound(grads_of(optimizer)), beyond, 0, "", -1});
  const GradStats& stats = found.stats;
  require(options_.ranks == nullptr || found.any, ErrorCode::kWrongOrder, [] {
    return "step() was called for an optimizer none of whose parameters has a gradient on any "
           "rank; set them, or do not step it.";
  });
  Verdict verdict = decide(stats.finite(), stats.norm(), stats.amax, scale, options.max_norm);
  if (known.overflow) {
    verdict.skip = Skip::kNotFinite;
    if (!known.culprit.empty()) {
      found.culprit = known.culprit;
      found.culprit_rank = known.culprit_rank;
    }
  }
  if (options.outside_found != nullptr && *options.outside_found != 0.0f) {
    verdict.skip = Skip::kNotFinite;
  }
  if (verdict.apply() && found.new_inf > 0) {
    verdict.skip = Skip::kUnscaleOverflow;
    found.culprit = internal::describe_unscaling_in_place(stats.amax, scale);
  } else if (verdict.skip == Skip::kUnscaleOverflow) {
    if (usable(scale)) found.culprit = unscale_culprit(optimizer, scale);
    if (found.culprit.empty()) {
      found.culprit =
          (usable(scale) ? "another rank: " : "") + internal::describe_unscaling(stats.amax, scale);
    }
  }

  return conclude(optimizer, options, verdict, std::move(found), &known);
}

// Whether this optimizer cannot take its gradients unscaled. A norm that is clipped bounds them.
bool GradScaler::beyond_its_format(const Optimizer& optimizer, const StepOptions& options,
                                   float scale) {
  constexpr float kHalfMax = 65504.0f;
  const bool clipped = options.max_norm > 0.0f && options.max_norm <= kHalfMax;
  return usable(scale) && scale < 1.0f && !clipped && optimizer.overflows(inverse(scale));
}

// Skips a step whose gradients were found bad elsewhere.
StepReport GradScaler::skip(Optimizer& optimizer, const StepOptions& options,
                            const std::string& culprit) {
  Known& known = enter_step(optimizer, options);
  Verdict verdict;
  verdict.skip = Skip::kNotFinite;
  verdict.grad_norm = std::nan("");
  return conclude(optimizer, options, verdict, {{}, 0, 0, culprit, -1}, &known);
}

// Applies or skips, and tells so.
StepReport GradScaler::conclude(Optimizer& optimizer, const StepOptions& options,
                                const Verdict& verdict, Finding found, Known* known) {
  if (verdict.apply()) {
    optimizer.apply(verdict.multiplier, options.clear_grads == ClearGrads::kAlways);
  } else {
    optimizer.skipped(found.culprit);
    if (options.clear_grads != ClearGrads::kNever) optimizer.zero_grad();
  }
  if (options.tell_skipped != nullptr) *options.tell_skipped = verdict.apply() ? 0.0f : 1.0f;
  StepReport report;
  report.applied = verdict.apply();
  report.skip = verdict.skip;
  report.scale = known->scale;
  report.grad_norm = verdict.grad_norm;
  report.clip_factor = verdict.clip_factor;
  report.stats = found.stats;
  report.culprit = std::move(found.culprit);
  report.culprit_rank = found.culprit_rank;
  report.steps = known->report.steps + 1;
  report.skipped = known->report.skipped + (report.applied ? 0 : 1);
  known->report = report;
  last_stepped_ = optimizer.identity_->id;
  if (known->stage != Stage::kUnscaled) known->amax = found.stats.amax;
  if (enabled()) known->stage = Stage::kStepped;
  if (enabled()) record(!report.applied, report.culprit, known);
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
    return "update() was called before any scale(); scale a loss, run backward, step, then "
           "update.";
  });
  require(recorded_, ErrorCode::kWrongOrder, [] {
    return "update() was called but no optimizer was stepped or unscaled since the last one; "
           "call "
           "step() first. With micro-batches, update once, after the step.";
  });
  if (cuda_ != nullptr) return update_on_device();
  const Transition next = next_state(policy_, state_, seen_);
  const float used = state_.scale;
  move_to(next.state);
  if (next.alarm != Alarm::kNone) raise(next.alarm, used, state_.skips_in_row, culprit_);
}

void GradScaler::update(float new_scale) {
  if (!enabled()) return;
  check_no_waiting("update(new_scale)");
  require(allows(policy_, new_scale), ErrorCode::kInvalidArgument, [&] {
    return "A scale of " + number(new_scale) + " cannot be set; the policy allows " +
           scales_of(policy_) + ".";
  });
  ScaleState next = initial_state(policy_);
  next.scale = new_scale;
  next.pending = new_scale;
  next.steps = state().steps;
  next.skipped = state_.skipped;
  move_to(next);
}

void GradScaler::assume_known() { losses_used_ = losses_; }

void GradScaler::more_gradients() { ++losses_; }

void GradScaler::discard() {
  losses_used_ = losses_;
  for (auto& [id, known] : known_) {
    known.losses = losses_;
    if (known.stage == Stage::kUnscaled) known.begin(known.round);  // others come in their place
  }
}

void GradScaler::check_no_waiting(const char* call) const {
  require(losses_ == losses_used_, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called while gradients wait that were made with another " +
           "scale; step first, or drop them and call discard().";
  });
}

// The gradients that wait under this optimizer when a round ends: those that were unscaled and not
// stepped, and those of losses that came after its last step.
GradScaler::Waiting GradScaler::waiting(const Known& known) const {
  if (known.stage == Stage::kUnscaled && known.round == round_) return Waiting::kUnscaled;
  return known.losses != losses_ ? Waiting::kScaled : Waiting::kNone;
}

// Takes the next scale, and takes the gradients along that still wait under known optimizers.
void GradScaler::move_to(const ScaleState& next) {
  for (auto& [id, known] : known_) {
    const auto identity = known.identity.lock();
    const Waiting waits = waiting(known);
    if (identity == nullptr || waits == Waiting::kNone) continue;
    const float has = waits == Waiting::kUnscaled ? 1.0f : state_.scale;
    if (has != next.scale) rescale(*identity->owner, has, next.scale);
    known.goes_on(next.scale);
    if (known.cuda != nullptr) known.cuda->set_scale(next.scale);
  }
  state_ = next;
  if (cuda_ != nullptr) cuda_->set_state(policy_, state_);
  next_round();
}

void GradScaler::next_round() {
  ++round_;
  losses_before_ = losses_;
  recorded_ = false;
  seen_ = StepSeen{};
}

void GradScaler::raise(Alarm alarm, float scale, int64_t skips_in_row,
                       const std::string& culprit) const {
  AlarmReport report;
  report.alarm = alarm;
  report.scale = scale;
  report.skips_in_row = skips_in_row;
  report.culprit = culprit;
  const std::string what = policy_.rerun ? " pass" : " step";
  const std::string skips = skips_in_row == 1
                                ? "1" + what + " was skipped"
                                : std::to_string(skips_in_row) + what +
                                      (policy_.rerun ? "es" : "s") + " in a row were skipped";
  report.sentence = alarm == Alarm::kAtFloor
                        ? "The gradients overflowed at a scale of " + number(scale) +
                              " and the policy allows none smaller (min_scale " +
                              number(policy_.min_scale) + "); " + skips
                        : skips + ", the last at a scale of " + number(scale) + "; the limit is " +
                              std::to_string(most_skips(policy_));
  report.sentence += ". The last culprit was " +
                     (culprit.empty() ? std::string("not named") : culprit) +
                     ". Scaling cannot help here: look for inf or nan in the data or the forward "
                     "pass, lower the learning rate, or use bf16.";
  if (!options_.on_alarm) throw Error(ErrorCode::kScaleCollapsed, report.sentence);
  options_.on_alarm(report);
}

}  // namespace headroom
