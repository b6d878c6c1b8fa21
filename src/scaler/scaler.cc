// Scaler: drives the stages of a step on the CPU. Scalers on a CUDA device are in device.cc,
// agreement between ranks in ranks.cc.
#include "scaler/scaler.h"

#include <headroom/accumulate.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "apply/checks.h"
#include "core/check.h"
#include "core/element.h"
#include "core/float_environment.h"
#include "measure/bound.h"
#include "measure/stats.h"

namespace headroom {
namespace internal {
namespace {

// All arrays of the parameters, or all but the gradients, sorted by address.
std::vector<TensorView> memory_of(const Optimizer& optimizer, bool with_gradients = true) {
  std::vector<TensorView> memory;
  for (const Parameter& parameter : optimizer.parameters()) {
    for (const NamedView& array : arrays_of(parameter)) {
      if (!with_gradients && array.view == &parameter.grad) continue;
      if (array.view->count > 0) memory.push_back(*array.view);
    }
  }
  std::sort(memory.begin(), memory.end(),
            [](const TensorView& a, const TensorView& b) { return a.data < b.data; });
  return memory;
}

// Merges two lists that are sorted by address and have no overlaps within themselves.
bool share_memory(const std::vector<TensorView>& a, const std::vector<TensorView>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (overlap(a[i], b[j])) return true;
    (a[i].data < b[j].data ? i : j) += 1;
  }
  return false;
}

// Names the first tensor whose unscaled values exceed what a step accepts; empty if none does.
// Reads the gradients again, but only for a step that is skipped for this reason.
std::string unscale_culprit(const Optimizer& optimizer, float scale) {
  for (const Parameter& parameter : optimizer.parameters()) {
    const double amax = unscale_bound({parameter.grad}, 1.0f).amax;
    if (decide(true, amax, amax, scale, {}).apply()) continue;
    return parameter.name + ": " + describe_unscaling(amax, scale);
  }
  return "";
}

void check_norm(const char* name, float norm) {
  check_value(norm >= 0.0f && std::isfinite(norm), name, norm,
              "a finite number above 0, or 0 for none");
}

// The text of AlarmReport::sentence. With retries, passes are counted and not steps.
std::string alarm_sentence(const AlarmReport& report, const ScalePolicy& policy) {
  const std::string what = policy.retries() ? " pass" : " step";
  const std::string skips = report.skips_in_row == 1
                                ? "1" + what + " was skipped"
                                : std::to_string(report.skips_in_row) + what +
                                      (policy.retries() ? "es" : "s") + " in a row were skipped";
  const std::string scale = short_number(report.scale);
  const std::string event = report.alarm == Alarm::kAtFloor
                                ? "The gradients overflowed at a scale of " + scale +
                                      " and the policy allows none smaller (min_scale " +
                                      short_number(policy.min_scale()) + "); " + skips
                                : skips + ", the last at a scale of " + scale + "; the limit is " +
                                      std::to_string(max_skips_in_row(policy));
  return event + (report.culprit.empty() ? "" : ". The last culprit was " + report.culprit) +
         (policy.if_static() == nullptr || report.scale <= 1.0f
              ? ". Scaling cannot help here: look for inf or nan in the data or the forward pass, "
                "lower the learning rate, or use bf16."
              : ". The scale is constant: use a smaller one or a policy that lowers it; then look "
                "for inf or nan in the data or the forward pass.");
}

}  // namespace

std::vector<TensorView> gradients_of(const Optimizer& optimizer, bool counted) {
  std::vector<TensorView> grads;
  grads.reserve(optimizer.parameters().size());
  for (const Parameter& parameter : optimizer.parameters()) {
    grads.push_back(parameter.counted == counted ? parameter.grad : TensorView{});
  }
  return grads;
}

AlarmReport alarm_report(const ScalePolicy& policy, Alarm alarm, float scale, int64_t skips_in_row,
                         const std::string& culprit) {
  AlarmReport report{alarm, scale, skips_in_row, culprit, ""};
  report.sentence = alarm_sentence(report, policy);
  return report;
}

StepReport make_report(const Verdict& verdict, const GradStats& stats, float scale) {
  StepReport report;
  report.applied = verdict.apply();
  report.skip = verdict.skip;
  report.scale = scale;
  report.grad_norm = verdict.grad_norm;
  report.clip_factor = verdict.clip_factor;
  report.stats = stats;
  return report;
}

void apply_or_skip(Optimizer& optimizer, const StepOptions& options, const StepReport& report,
                   float multiplier) {
  if (report.applied) {
    optimizer.apply(multiplier, options.clear_grads == ClearGrads::kAlways);
  } else {
    optimizer.skipped(report.culprit);
    if (options.clear_grads != ClearGrads::kNever) optimizer.zero_grad();
  }
}

bool has_copies(const Optimizer& optimizer) {
  return std::any_of(optimizer.parameters().begin(), optimizer.parameters().end(),
                     [](const Parameter& parameter) { return !parameter.counted; });
}

GradStats measure_gradients(const Optimizer& optimizer, float factor) {
  GradStats stats = unscale_bound(gradients_of(optimizer), factor);
  if (has_copies(optimizer)) {
    merge_copies(unscale_bound(gradients_of(optimizer, false), factor), &stats);
  }
  return stats;
}

std::string allowed_scales(const ScalePolicy& policy) {
  return (policy.if_headroom() != nullptr ? "powers of two from " : "") +
         number(policy.min_scale()) + " to " + number(policy.max_scale());
}

Scaler::Scaler(const ScalePolicy& policy, ScalerOptions given) : options(std::move(given)) {
  check_policy(policy);
  record = {policy, initial_numbers(policy)};
  check_ranks();
  if (options.device.type == DeviceType::kCPU) return;
  cuda = std::make_shared<CudaScaler>(options.device.index);
  cuda->set_record(record, 1.0f);
}

ScaleNumbers Scaler::numbers() const { return on_device() ? cuda->wait_numbers() : record.numbers; }

void Scaler::check_policy(const ScalePolicy& policy) const {
  validate(policy);
  const bool waits = policy.on_overflow() != OnOverflow::kSkip;
  require(!waits || options.device.type == DeviceType::kCPU, ErrorCode::kInvalidArgument,
          "OnOverflow::kThrow needs the host to wait for every verdict; use it with a scaler on "
          "the CPU, or on_alarm with max_skips_in_row.");
}

// kSecondOptimizer is a limitation of the policy, not a mistake in the order of calls.
void Scaler::allow(CallOrder::Refusal refusal, const char* call) {
  const bool unsupported = refusal == CallOrder::Refusal::kSecondOptimizer;
  require(refusal == CallOrder::Refusal::kNone,
          unsupported ? ErrorCode::kUnsupported : ErrorCode::kWrongOrder,
          [&] { return refusal_sentence(refusal, call); });
}

uint64_t Scaler::id_of(const Optimizer& optimizer) {
  check_not_moved_from(optimizer.record_ != nullptr);
  return optimizer.record_->id;
}

bool Scaler::has_gradient(const Optimizer& optimizer) {
  return std::any_of(optimizer.parameters().begin(), optimizer.parameters().end(),
                     [](const Parameter& parameter) { return parameter.grad.data != nullptr; });
}

// Compares the optimizer's memory with that of the others, because a parameter in two optimizers
// would be unscaled and updated twice. Does nothing if the parameters have not changed since the
// last call.
//
// Two wrappers of a framework's optimizers may share gradients, in different rounds, if they have
// no weights here or follow changes of the weights. The wrapper that was used earlier then loses
// its entry in the call order and is compared again before its next use.
OptimizerEntry& Scaler::find_or_add(Optimizer& optimizer) {
  const uint64_t id = id_of(optimizer);
  const uint64_t revision = optimizer.record_->revision;
  const auto found = optimizers.find(id);
  if (found != optimizers.end() && found->second.checked_revision == revision) {
    return found->second;
  }
  std::erase_if(optimizers, [&](const auto& entry) {  // optimizers that were destroyed
    if (!entry.second.record.expired()) return false;
    order.forget(entry.first);
    return true;
  });
  std::vector<TensorView> memory = memory_of(optimizer);
  std::vector<uint64_t> replaced;
  for (auto& [other_id, other] : optimizers) {
    if (other_id == id) continue;
    const auto other_record = other.record.lock();
    const bool stale = other_record->revision != other.checked_revision;
    if (!stale && !share_memory(memory, other.memory)) continue;
    other_record->owner->refresh();  // its tensors may have moved since
    const Optimizer& owner = *other_record->owner;
    if (!share_memory(memory, memory_of(owner))) continue;
    const bool weights = !(optimizer.follows_weights() && owner.follows_weights()) &&
                         share_memory(memory_of(optimizer, false), memory_of(owner, false));
    require(!weights && !order.is_used(other_id), ErrorCode::kInvalidArgument,
            "A parameter of this optimizer belongs to another optimizer under the same scaler "
            "too; give each parameter to one optimizer only.");
    replaced.push_back(other_id);
  }
  for (const uint64_t other : replaced) {
    order.forget(other);
    optimizers[other].checked_revision = 0;
    optimizers[other].memory.clear();
  }
  OptimizerEntry& entry = optimizers[id];  // added only now: a refused optimizer leaves no entry
  if (entry.checked_revision == 0) entry.ordinal = optimizers_seen_++;
  entry.record = optimizer.record_;
  entry.checked_revision = revision;
  entry.memory = std::move(memory);
  return entry;
}

OptimizerEntry& Scaler::begin_step(Optimizer& optimizer, const StepOptions& given) {
  check_norm("max_norm", given.max_norm);
  check_norm("skip_above_norm", given.skip_above_norm);
  optimizer.refresh();
  const uint64_t id = id_of(optimizer);
  // unscale_() may have seen gradients that are cleared now: its verdict counts, and nothing moves.
  const bool seen = order.is_unscaled(id) && optimizers.at(id).had_gradients;
  require(has_gradient(optimizer) || seen || options.ranks != nullptr, ErrorCode::kWrongOrder,
          "step() was called for an optimizer none of whose parameters has a gradient; run "
          "backward first, or do not step this optimizer in this round.");
  const bool retries = options.enabled && record.policy.retries();
  if (options.enabled) allow(order.may_step(id, retries), "step()");
  require(!retries || dynamic_cast<const GradAccumulator*>(&optimizer) == nullptr,
          ErrorCode::kUnsupported,
          "A GradAccumulator was stepped under a policy that retries batches, but a pass that "
          "overflows makes its sums unusable; use the preset 'headroom'.");
  return find_or_add(optimizer);  // last, because a refused optimizer must not keep its parameters
}

// The culprit is kept for the alarm that update() may raise.
void Scaler::see(bool overflow, double amax, const std::string& culprit) {
  internal::see(overflow, amax, &seen_);
  if (overflow) culprit_ = culprit;
}

StepReport Scaler::step(Optimizer& optimizer, const StepOptions& given,
                        const ExternalScale& external) {
  const DefaultFloatEnvironment environment;
  const StreamScope stream(given.stream);
  OptimizerEntry& entry = begin_step(optimizer, given);
  if (on_device()) return step_on_device(optimizer, given, external, &entry);
  const bool unscaled = order.is_unscaled(id_of(optimizer));
  const float own = options.enabled ? record.numbers.scale : 1.0f;
  const float loss_scale = external.scale != nullptr ? *external.scale : own;
  const float scale = unscaled ? 1.0f : loss_scale;  // of the gradients in memory

  // new_inf carries the local check to the other ranks: if one rank cannot unscale, all skip.
  GradStats mine = measure_gradients(optimizer);
  mine.new_inf = overflows_in_place(optimizer, given, scale) ? 1 : 0;
  CombinedStats found = agree(optimizer, &entry, &given, mine);
  const GradStats& stats = found.stats;
  require(options.ranks == nullptr || found.any, ErrorCode::kWrongOrder,
          "step() was called for an optimizer none of whose parameters has a gradient on any "
          "rank; run backward first, or do not step this optimizer in this round.");
  const bool unscaled_bad = unscaled && entry.numbers.found_inf != 0.0f;
  const bool bad = unscaled_bad || (external.found_inf != nullptr && *external.found_inf != 0.0f);
  Verdict verdict = decide(stats.finite() && !bad, stats.norm(), stats.amax, scale,
                           {given.max_norm, given.skip_above_norm});
  // unscale_() has found the bad tensor; since then its inf may have been clipped or overwritten.
  if (unscaled_bad && !entry.unscaled_culprit.empty()) {
    found.culprit = entry.unscaled_culprit;
    copy_culprit(entry.unscaled, &found.stats);
  }
  // Name the reason if unscaling overflows. The largest gradient may be on another rank.
  if (verdict.apply() && stats.new_inf > 0) {
    verdict.skip = Skip::kUnscaleOverflow;
    found.culprit = describe_unscaling_in_place(stats.amax, scale);
  } else if (verdict.skip == Skip::kUnscaleOverflow) {
    if (usable(scale)) found.culprit = unscale_culprit(optimizer, scale);
    if (found.culprit.empty()) {
      found.culprit =
          (usable(scale) ? "another rank: " : "") + describe_unscaling(stats.amax, scale);
    }
  }
  return finish_step(optimizer, given, verdict, loss_scale, std::move(found), &entry);
}

// Whether this optimizer stores unscaled gradients in a format that they overflow: an FP16 gradient
// divided by a scale below 1. Clipping to a norm within FP16's range prevents it.
bool Scaler::overflows_in_place(const Optimizer& optimizer, const StepOptions& given, float scale) {
  const bool clipped = given.max_norm > 0.0f && given.max_norm <= kLargestF16;
  return usable(scale) && scale < 1.0f && !clipped && optimizer.overflows(inverse(scale));
}

StepReport Scaler::skip(Optimizer& optimizer, const StepOptions& given,
                        const std::string& culprit) {
  OptimizerEntry& entry = begin_step(optimizer, given);
  Verdict verdict;
  verdict.skip = Skip::kNotFinite;
  verdict.grad_norm = std::nan("");
  return finish_step(optimizer, given, verdict, record.numbers.scale, {{}, culprit}, &entry);
}

// Applies or skips the step, counts it and reports it. With OnOverflow::kThrow the report is thrown
// as an error, after everything is done.
StepReport Scaler::finish_step(Optimizer& optimizer, const StepOptions& given,
                               const Verdict& verdict, float scale, CombinedStats found,
                               OptimizerEntry* entry) {
  const bool unscaled = order.is_unscaled(id_of(optimizer));
  entry->numbers = step_numbers(verdict, unscaled ? 1.0f : scale);
  StepReport report = make_report(verdict, found.stats, scale);
  report.culprit = std::move(found.culprit);
  report.steps = entry->report.steps + 1;
  report.skipped = entry->report.skipped + (report.applied ? 0 : 1);
  apply_or_skip(optimizer, given, report, verdict.multiplier);
  last_stepped = id_of(optimizer);
  if (options.enabled) {
    order.stepped(id_of(optimizer));
    // After unscale_() the gradients in memory are no longer scaled; it has reported their amax.
    see(overflowed(verdict.skip), unscaled ? 0.0 : report.stats.amax, report.culprit);
  }
  entry->report = report;
  const bool cleared = report.applied ? given.clear_grads == ClearGrads::kAlways
                                      : given.clear_grads != ClearGrads::kNever;
  if (cleared) optimizer.gradients_changed();  // last: it is the user's, and may throw
  require(!overflowed(verdict.skip) || record.policy.on_overflow() == OnOverflow::kSkip,
          ErrorCode::kOverflow, [&] {
            return "The step was " + report.to_string() +
                   "; the weights are as before. Lower the scale, or use a dynamic one.";
          });
  return report;
}

// The alarm is raised last: on_alarm() may throw, and the update is complete by then.
void Scaler::update() {
  const DefaultFloatEnvironment environment;
  allow(order.may_update(), "update()");
  const std::vector<WaitingGradients> waiting = waiting_gradients();
  if (on_device()) {
    cuda->update();
    end_round(waiting, 1.0f, 1.0f);
    raise_device_alarms();
    return;
  }
  const float used = record.numbers.scale;
  const Alarm alarm = advance(record.policy, seen_, &record.numbers);
  end_round(waiting, used, record.numbers.scale);
  if (alarm != Alarm::kNone) raise(alarm, used, record.numbers.skips_in_row, culprit_);
}

// The gradients that end_round() will rescale. Separate from it, because this may throw and nothing
// must have changed by then. Optimizers may take turns on the same parameters: each tensor is
// listed once.
std::vector<WaitingGradients> Scaler::waiting_gradients() {
  std::vector<WaitingGradients> all;
  std::set<const void*> seen;
  for (const CallOrder::Rescale& rescale : order.rescales()) {
    OptimizerEntry& entry = optimizers[rescale.optimizer];
    WaitingGradients waiting{&entry, entry.record.lock(), rescale.unscaled, {}};
    if (waiting.record == nullptr) continue;
    Optimizer& owner = *waiting.record->owner;
    owner.refresh();
    bool shared = false;
    for (const Parameter& parameter : owner.parameters()) {
      const TensorView& grad = parameter.grad;
      const bool is_new = grad.count == 0 || seen.insert(grad.data).second;
      waiting.gradients.push_back(is_new ? grad : TensorView{});
      shared = shared || !is_new;
    }
    if (on_device()) {
      list_gradients(owner, &entry);
      if (shared) {
        entry.listed_revision = 0;  // the next step lists all of them again
        entry.cuda->set_lists(waiting.gradients, {});
      }
    }
    all.push_back(std::move(waiting));
  }
  return all;
}

// Begins the next round. Gradients that wait for a later step are rescaled from one scale to the
// other. On a CUDA device the host does not have the scales, and `from` and `to` are not used.
// Optimizers are notified last: gradients_changed() is the user's, and may throw.
void Scaler::end_round(const std::vector<WaitingGradients>& waiting, float from, float to) {
  const auto factor_of = [&](const WaitingGradients& each) {
    return each.unscaled ? to : rescale_factor(from, to);
  };
  for (const WaitingGradients& each : waiting) {
    if (on_device()) {
      cuda->rescale(each.unscaled, each.entry->cuda.get());
    } else if (factor_of(each) != 1.0f) {
      unscale_bound(each.gradients, factor_of(each));
    }
  }
  order.end_round();
  seen_ = StepSeen{};
  for (const WaitingGradients& each : waiting) {
    if (on_device() || factor_of(each) != 1.0f) each.record->owner->gradients_changed();
  }
}

// Everything that can throw comes before the first change. numbers() waits for a CUDA device.
void Scaler::replace(const ScaleRecord& next, const char* call) {
  allow(order.may_set_scale(), call);
  const std::vector<WaitingGradients> waiting = waiting_gradients();
  const float before = numbers().scale;
  if (on_device()) cuda->set_record(next, rescale_factor(before, next.numbers.scale));
  record = next;
  end_round(waiting, before, next.numbers.scale);
}

// Calls on_alarm, or throws Error(kScaleCollapsed) if there is none.
void Scaler::raise(Alarm alarm, float scale, int64_t skips_in_row,
                   const std::string& culprit) const {
  const AlarmReport report = alarm_report(record.policy, alarm, scale, skips_in_row, culprit);
  if (!options.on_alarm) throw Error(ErrorCode::kScaleCollapsed, report.sentence);
  options.on_alarm(report);
}

}  // namespace internal

}  // namespace headroom
