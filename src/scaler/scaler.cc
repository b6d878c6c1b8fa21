// GradScaler on the CPU: the order of the stages. What runs on a CUDA device is in device.cc, what
// concerns several ranks in ranks.cc.
#include "scaler/scaler.h"

#include <headroom/accumulate.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "apply/checks.h"
#include "core/check.h"
#include "core/float_environment.h"
#include "decide/numbers.h"
#include "measure/bound.h"
#include "measure/stats.h"

namespace headroom {
namespace internal {
namespace {

// All memory of the parameters, or all but the gradients, sorted by address.
std::vector<TensorView> memory_of(const Optimizer& optimizer, bool with_gradients = true) {
  std::vector<TensorView> memory;
  for (const Parameter& parameter : optimizer.parameters()) {
    for (const TensorView& view :
         {parameter.weight, parameter.master, parameter.first_moment, parameter.second_moment}) {
      if (view.count > 0) memory.push_back(view);
    }
    if (with_gradients && parameter.grad.count > 0) memory.push_back(parameter.grad);
  }
  std::sort(memory.begin(), memory.end(),
            [](const TensorView& a, const TensorView& b) { return a.data < b.data; });
  return memory;
}

// Both sorted by address and free of overlaps within.
bool share_memory(const std::vector<TensorView>& a, const std::vector<TensorView>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (overlap(a[i], b[j])) return true;
    (a[i].data < b[j].data ? i : j) += 1;
  }
  return false;
}

// Names the first tensor whose unscaled values leave FP32's range.
std::string unscale_culprit(const Optimizer& optimizer, float scale) {
  for (const Parameter& parameter : optimizer.parameters()) {
    const double amax = measure_bound({parameter.grad}).amax;
    if (decide(true, amax, amax, scale, {}).apply()) continue;
    return parameter.name + ": " + describe_unscaling(amax, scale);
  }
  return "";
}

void check_norm(const char* name, float norm) {
  require(norm >= 0.0f && std::isfinite(norm), ErrorCode::kInvalidArgument, [&] {
    return std::string(name) + " is " + number(norm) +
           "; it has to be a finite number above 0, or 0 for none.";
  });
}

}  // namespace

std::vector<TensorView> grads_of(const Optimizer& optimizer, bool counted) {
  std::vector<TensorView> grads;
  grads.reserve(optimizer.parameters().size());
  for (const Parameter& parameter : optimizer.parameters()) {
    grads.push_back(parameter.counted == counted ? parameter.grad : TensorView{});
  }
  return grads;
}

bool has_copies(const Optimizer& optimizer) {
  return std::any_of(optimizer.parameters().begin(), optimizer.parameters().end(),
                     [](const Parameter& parameter) { return !parameter.counted; });
}

GradStats measure_gradients(const Optimizer& optimizer, float factor) {
  GradStats stats = unscale_bound(grads_of(optimizer), factor);
  if (has_copies(optimizer)) {
    merge_copies(unscale_bound(grads_of(optimizer, false), factor), &stats);
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
  require(!waits || options.device.type == DeviceType::kCPU, ErrorCode::kInvalidArgument, [] {
    return "OnOverflow::kThrow needs the host to wait for every verdict; use it with a scaler on "
           "the CPU, or on_alarm with max_skips_in_row.";
  });
}

void Scaler::allow(CallOrder::Refusal refusal, const char* call) {
  const bool unsupported = refusal == CallOrder::Refusal::kSecondOptimizer;
  require(refusal == CallOrder::Refusal::kNone,
          unsupported ? ErrorCode::kUnsupported : ErrorCode::kWrongOrder,
          [&] { return refusal_sentence(refusal, call); });
}

uint64_t Scaler::id_of(const Optimizer& optimizer) {
  check_whole(optimizer.record_ != nullptr);
  return optimizer.record_->id;
}

bool Scaler::has_gradient(const Optimizer& optimizer) {
  return std::any_of(optimizer.parameters().begin(), optimizer.parameters().end(),
                     [](const Parameter& parameter) { return parameter.grad.data != nullptr; });
}

// A parameter in two optimizers would be unscaled and updated twice. Wrappers of a framework's
// optimizers, which have no weights here, may use the same gradients in rounds of their own: then
// the framework keeps the weights, and the earlier wrapper begins anew.
OptimizerEntry& Scaler::enter(Optimizer& optimizer) {
  const uint64_t id = id_of(optimizer);
  optimizer.refresh();
  const uint64_t revision = optimizer.record_->revision;
  const auto found = optimizers.find(id);
  if (found != optimizers.end() && found->second.checked_revision == revision) {
    return found->second;
  }
  std::erase_if(optimizers, [&](const auto& entry) {
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
    other_record->owner->refresh();  // its tensors may have moved away
    const Optimizer& owner = *other_record->owner;
    if (!share_memory(memory, memory_of(owner))) continue;
    const bool weights = share_memory(memory_of(optimizer, false), memory_of(owner, false));
    require(!weights && !order.is_used(other_id), ErrorCode::kInvalidArgument, [] {
      return "A parameter of this optimizer belongs to another optimizer under the same scaler "
             "too; give each parameter to one optimizer only.";
    });
    replaced.push_back(other_id);
  }
  for (const uint64_t other : replaced) {
    order.forget(other);
    optimizers[other].checked_revision = 0;
    optimizers[other].memory.clear();
  }
  OptimizerEntry& entry = optimizers[id];  // one that is refused leaves nothing behind
  if (entry.checked_revision == 0) entry.ordinal = optimizers_seen_++;
  entry.record = optimizer.record_;
  entry.checked_revision = revision;
  entry.memory = std::move(memory);
  return entry;
}

void Scaler::assume_loss() {
  if (losses_unseen) order.gradients_added();
}

OptimizerEntry& Scaler::enter_step(Optimizer& optimizer, const StepOptions& given) {
  check_norm("max_norm", given.max_norm);
  check_norm("skip_above_norm", given.skip_above_norm);
  OptimizerEntry& entry = enter(optimizer);
  require(has_gradient(optimizer) || options.ranks != nullptr, ErrorCode::kWrongOrder, [] {
    return "step() was called for an optimizer none of whose parameters has a gradient; set them, "
           "or do not step it.";
  });
  if (!options.enabled) return entry;
  const bool retries = record.policy.retries();
  allow(order.may_step(id_of(optimizer), retries), "step()");
  require(!retries || dynamic_cast<const GradAccumulator*>(&optimizer) == nullptr,
          ErrorCode::kUnsupported, [] {
            return "A GradAccumulator was stepped under a policy that retries batches, but a pass "
                   "that overflows spoils its sums for good; use the preset 'headroom'.";
          });
  return entry;
}

void Scaler::see(bool overflow, double amax, const std::string& culprit) {
  internal::see(overflow, amax, &seen_);
  if (overflow) culprit_ = culprit;
}

StepReport Scaler::step(Optimizer& optimizer, const StepOptions& given,
                        const ExternalScale& external) {
  const DefaultFloatEnvironment environment;
  const StreamScope stream(given.stream);
  assume_loss();
  OptimizerEntry& entry = enter_step(optimizer, given);
  if (on_device()) return step_on_device(optimizer, given, external, &entry);
  const bool unscaled = order.is_unscaled(id_of(optimizer));
  const float own = options.enabled ? record.numbers.scale : 1.0f;
  const float made_with = external.scale != nullptr ? *external.scale : own;
  const float scale = unscaled ? 1.0f : made_with;

  GradStats mine = measure_gradients(optimizer);
  mine.new_inf = beyond_its_format(optimizer, given, scale) ? 1 : 0;
  Finding found = agree(optimizer, &entry, &given, mine);
  const GradStats& stats = found.stats;
  require(options.ranks == nullptr || found.any, ErrorCode::kWrongOrder, [] {
    return "step() was called for an optimizer none of whose parameters has a gradient on any "
           "rank; set them, or do not step it.";
  });
  const bool unscaled_bad = unscaled && entry.numbers.found_inf != 0.0f;
  const bool bad = unscaled_bad || (external.found_inf != nullptr && *external.found_inf != 0.0f);
  Verdict verdict = decide(stats.finite() && !bad, stats.norm(), stats.amax, scale,
                           {given.max_norm, given.skip_above_norm});
  if (unscaled_bad && !entry.unscaled_culprit.empty()) {
    found.culprit = entry.unscaled_culprit;
    copy_culprit(entry.unscaled, &found.stats);
  }
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
  found.scale = made_with;
  return conclude(optimizer, given, verdict, std::move(found), &entry);
}

// Whether this optimizer cannot hold its gradients unscaled. A norm that is clipped bounds them.
bool Scaler::beyond_its_format(const Optimizer& optimizer, const StepOptions& given, float scale) {
  constexpr float kHalfMax = 65504.0f;
  const bool clipped = given.max_norm > 0.0f && given.max_norm <= kHalfMax;
  return usable(scale) && scale < 1.0f && !clipped && optimizer.overflows(inverse(scale));
}

StepReport Scaler::skip(Optimizer& optimizer, const StepOptions& given,
                        const std::string& culprit) {
  OptimizerEntry& entry = enter_step(optimizer, given);
  Verdict verdict;
  verdict.skip = Skip::kNotFinite;
  verdict.grad_norm = std::nan("");
  return conclude(optimizer, given, verdict, {{}, culprit, true, record.numbers.scale}, &entry);
}

// Applies or skips, and reports.
StepReport Scaler::conclude(Optimizer& optimizer, const StepOptions& given, const Verdict& verdict,
                            Finding found, OptimizerEntry* entry) {
  const bool unscaled = order.is_unscaled(id_of(optimizer));
  entry->numbers = step_numbers(verdict, unscaled ? 1.0f : found.scale);
  if (verdict.apply()) {
    optimizer.apply(verdict.multiplier, given.clear_grads == ClearGrads::kAlways);
    if (given.clear_grads == ClearGrads::kAlways) optimizer.gradients_changed();
  } else {
    optimizer.skipped(found.culprit);
    if (given.clear_grads != ClearGrads::kNever) {
      optimizer.zero_grad();
      optimizer.gradients_changed();
    }
  }
  StepReport report;
  report.applied = verdict.apply();
  report.skip = verdict.skip;
  report.scale = found.scale;
  report.grad_norm = verdict.grad_norm;
  report.clip_factor = verdict.clip_factor;
  report.stats = found.stats;
  report.culprit = std::move(found.culprit);
  report.steps = entry->report.steps + 1;
  report.skipped = entry->report.skipped + (report.applied ? 0 : 1);
  entry->report = report;
  last_stepped = id_of(optimizer);
  if (options.enabled) {
    order.stepped(id_of(optimizer));
    see(overflowed(verdict.skip), unscaled ? 0.0 : report.stats.amax, report.culprit);
  }
  require(!overflowed(verdict.skip) || record.policy.on_overflow() == OnOverflow::kSkip,
          ErrorCode::kOverflow, [&] {
            return "The step was " + report.to_string() +
                   "; the weights are as before. Lower the scale, or use a dynamic one.";
          });
  return report;
}

void Scaler::update() {
  const DefaultFloatEnvironment environment;
  allow(order.may_update(), "update()");
  prepare_rescales();
  if (on_device()) {
    cuda->update();
    end_round(1.0f, 1.0f);
    raise_device_alarms();
    return;
  }
  const float used = record.numbers.scale;
  const Alarm alarm = advance(record.policy, seen_, &record.numbers);
  end_round(used, record.numbers.scale);
  if (alarm != Alarm::kNone) raise(alarm, used, record.numbers.skips_in_row, culprit_);
}

// Looks at all gradients that will be rescaled, before anything changes: this may throw.
void Scaler::prepare_rescales() {
  for (const CallOrder::Rescale& rescale : order.rescales()) {
    OptimizerEntry& entry = optimizers[rescale.optimizer];
    const auto owner = entry.record.lock();
    if (owner == nullptr) continue;
    owner->owner->refresh();
    if (on_device()) list_gradients(*owner->owner, &entry);
  }
}

// Rescales gradients that wait for a later step, from one scale to another, and begins the next
// round. On a CUDA device both scales are known there only.
void Scaler::end_round(float from, float to) {
  for (const CallOrder::Rescale& rescale : order.rescales()) {
    OptimizerEntry& entry = optimizers[rescale.optimizer];
    const auto owner = entry.record.lock();
    if (owner == nullptr) continue;
    const float factor = rescale.unscaled ? to : rescale_factor(from, to);
    if (on_device()) {
      cuda->rescale(rescale.unscaled, entry.cuda.get());
    } else if (factor != 1.0f) {
      measure_gradients(*owner->owner, factor);
    } else {
      continue;
    }
    owner->owner->gradients_changed();
  }
  order.end_round();
  seen_ = StepSeen{};
}

void Scaler::replace(const ScaleRecord& next, const char* call) {
  allow(order.may_set_scale(), call);
  prepare_rescales();
  const float before = numbers().scale;
  record = next;
  if (on_device()) cuda->set_record(record, rescale_factor(before, next.numbers.scale));
  end_round(before, next.numbers.scale);
}

void Scaler::raise(Alarm alarm, float scale, int64_t skips_in_row,
                   const std::string& culprit) const {
  AlarmReport report;
  report.alarm = alarm;
  report.scale = scale;
  report.skips_in_row = skips_in_row;
  report.culprit = culprit;
  const ScalePolicy& policy = record.policy;
  const std::string what = policy.retries() ? " pass" : " step";
  const std::string skips = skips_in_row == 1
                                ? "1" + what + " was skipped"
                                : std::to_string(skips_in_row) + what +
                                      (policy.retries() ? "es" : "s") + " in a row were skipped";
  report.sentence = alarm == Alarm::kAtFloor
                        ? "The gradients overflowed at a scale of " + short_number(scale) +
                              " and the policy allows none smaller (min_scale " +
                              short_number(policy.min_scale()) + "); " + skips
                        : skips + ", the last at a scale of " + short_number(scale) +
                              "; the limit is " + std::to_string(max_skips_in_row(policy));
  report.sentence += ". The last culprit was " +
                     (culprit.empty() ? std::string("not named") : culprit) +
                     ". Scaling cannot help here: look for inf or nan in the data or the forward "
                     "pass, lower the learning rate, or use bf16.";
  if (!options.on_alarm) throw Error(ErrorCode::kScaleCollapsed, report.sentence);
  options.on_alarm(report);
}

}  // namespace internal

}  // namespace headroom
