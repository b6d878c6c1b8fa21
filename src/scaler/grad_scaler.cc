// The public class GradScaler, and the access of the bindings to it.
#include <algorithm>

#include "core/check.h"
#include "core/float_environment.h"
#include "scaler/scaler.h"

namespace headroom {

using internal::number;
using internal::require;
using internal::ScaleRecord;
using internal::ScaleStateAccess;

GradScaler::GradScaler(const ScalePolicy& policy, ScalerOptions options)
    : impl_(std::make_unique<internal::Scaler>(policy, std::move(options))) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

bool GradScaler::enabled() const { return impl_->options.enabled; }
const ScalePolicy& GradScaler::policy() const { return impl_->record.policy; }
float GradScaler::get_scale() const { return enabled() ? impl_->numbers().scale : 1.0f; }

// Unlike load_state(), this may be called while gradients wait: the scale does not change.
void GradScaler::set_policy(const ScalePolicy& policy) {
  impl_->check_policy(policy);
  internal::ScaleNumbers numbers = impl_->numbers();
  require(policy.allows(numbers.scale) && policy.allows(numbers.dynamic.pending),
          ErrorCode::kInvalidArgument, [&] {
            return "The scale is " + number(numbers.scale) + ", but the new policy allows " +
                   internal::allowed_scales(policy) + " only.";
          });
  // Counts that the new settings cannot reach are moved into their range.
  if (const DynamicScale* const rule = policy.if_dynamic()) {
    internal::DynamicMemory& memory = numbers.dynamic;
    if (!rule->late) memory.pending = numbers.scale;
    memory.growth_tracker = std::clamp(memory.growth_tracker,
                                       -std::max(rule->first_growth_extra, rule->next_growth_extra),
                                       rule->growth_interval - 1);
    memory.delay_left = std::min(memory.delay_left, rule->hysteresis);
  }
  const HeadroomScale* const headroom = policy.if_headroom();
  if (headroom == nullptr || !valid(*headroom, numbers.headroom)) numbers.headroom = {};
  const ScaleRecord changed = {policy, numbers};
  if (impl_->on_device()) impl_->cuda->set_record(changed, 1.0f);
  impl_->record = changed;
}

float GradScaler::scale(float loss) {
  if (!enabled()) return loss;
  const float factor = internal::ScalerAccess::begin_loss(*this);
  impl_->order.gradients_added();
  const internal::DefaultFloatEnvironment environment;
  return loss * factor;
}

// The order matters: the call is recorded as soon as the gradients are unscaled, before ranks can
// fail, so that they are never unscaled twice.
GradStats GradScaler::unscale_(Optimizer& optimizer, Stream stream) {
  if (!enabled()) return {};
  const internal::DefaultFloatEnvironment environment;
  const StreamScope scope(stream);
  internal::Scaler& scaler = *impl_;
  const uint64_t id = internal::Scaler::id_of(optimizer);
  internal::Scaler::allow(scaler.order.may_unscale(id), "unscale_()");
  optimizer.refresh();
  internal::OptimizerEntry& entry = scaler.find_or_add(optimizer);
  // Without gradients, this call gives update() nothing to decide by.
  const bool checked = internal::Scaler::has_gradient(optimizer) || scaler.options.ranks != nullptr;
  entry.had_gradients = checked;
  if (scaler.on_device()) {
    scaler.list_gradients(optimizer, &entry);
    scaler.cuda->unscale(scaler.cuda_ranks(optimizer, &entry, nullptr), entry.cuda.get());
    scaler.order.unscaled(id, checked);
    optimizer.gradients_changed();
    return {};
  }
  const GradStats mine =
      internal::measure_gradients(optimizer, internal::inverse(scaler.record.numbers.scale));
  scaler.order.unscaled(id, checked);
  optimizer.gradients_changed();
  entry.unscaled = mine;  // valid if agree() throws: the gradients are unscaled already
  entry.numbers.found_inf = mine.ok() ? 0.0f : 1.0f;
  entry.unscaled_culprit.clear();
  const internal::CombinedStats found = scaler.agree(optimizer, &entry, nullptr, mine);
  entry.unscaled = found.stats;
  entry.unscaled_culprit = found.culprit;
  entry.numbers.found_inf = found.stats.ok() ? 0.0f : 1.0f;
  if (checked) scaler.see(!found.stats.ok(), found.stats.amax, found.culprit);
  return found.stats;
}

StepReport GradScaler::step(Optimizer& optimizer, const StepOptions& options) {
  return impl_->step(optimizer, options, {});
}

void GradScaler::update(Stream stream) {
  if (!enabled()) return;
  const StreamScope scope(stream);
  impl_->update();
}

void GradScaler::set_scale(float scale) {
  internal::ScalerAccess::set_scale(*this, scale, "set_scale()");
}

bool GradScaler::retry() const {
  return enabled() && internal::retry(impl_->record.policy, impl_->numbers());
}

void GradScaler::discard() { impl_->order.discard(); }

ScaleState GradScaler::state() const {
  return ScaleStateAccess::make({impl_->record.policy, impl_->numbers()});
}

void GradScaler::load_state(const ScaleState& state) {
  internal::ScalerAccess::set_record(*this, ScaleStateAccess::record(state), "load_state()");
}

std::string GradScaler::save() const {
  internal::Scaler::allow(impl_->order.may_save(), "save()");
  return state().save();
}

// A wrong order is reported before a bad text.
void GradScaler::load(std::string_view json) {
  internal::Scaler::allow(impl_->order.may_set_scale(), "load()");
  const ScaleState state = ScaleState::load(json);
  internal::ScalerAccess::set_record(*this, ScaleStateAccess::record(state), "load()");
}

StepReport GradScaler::report() const { return *impl_->report_of(impl_->last_stepped, true); }
StepReport GradScaler::report(const Optimizer& optimizer) const {
  return *impl_->report_of(internal::Scaler::id_of(optimizer), true);
}
std::optional<StepReport> GradScaler::try_report() const {
  return impl_->report_of(impl_->last_stepped, false);
}
std::optional<StepReport> GradScaler::try_report(const Optimizer& optimizer) const {
  return impl_->report_of(internal::Scaler::id_of(optimizer), false);
}

namespace internal {

float ScalerAccess::begin_loss(GradScaler& scaler) {
  if (!scaler.enabled()) return 1.0f;
  require(!scaler.impl_->on_device(), ErrorCode::kUnsupported,
          "This scaler's scale is on a CUDA device; call scale(loss, scaled) with tensors there.");
  scaler.impl_->order.loss_scaled();
  return scaler.impl_->record.numbers.scale;
}

void ScalerAccess::loss_scaled(GradScaler& scaler) { scaler.impl_->order.loss_scaled(); }
void ScalerAccess::assume_losses(GradScaler& scaler) { scaler.impl_->order.assume_losses(); }

void ScalerAccess::set_ranks(GradScaler& scaler, std::shared_ptr<Ranks> ranks,
                             RankGradients gradients) {
  scaler.impl_->set_ranks(std::move(ranks), gradients);
}

bool ScalerAccess::is_unscaled(const GradScaler& scaler, const Optimizer& optimizer) {
  return scaler.impl_->order.is_unscaled(Scaler::id_of(optimizer));
}

void ScalerAccess::move_to_host(GradScaler& scaler) { scaler.impl_->move_to_host(); }

float* ScalerAccess::scale_address(GradScaler& scaler) {
  Scaler& impl = *scaler.impl_;
  return impl.on_device() ? impl.cuda->scale_address() : &impl.record.numbers.scale;
}

StepNumbers* ScalerAccess::numbers_of(GradScaler& scaler, const Optimizer& optimizer) {
  const auto found = scaler.impl_->optimizers.find(Scaler::id_of(optimizer));
  if (found == scaler.impl_->optimizers.end()) return nullptr;
  OptimizerEntry& entry = found->second;
  return entry.cuda != nullptr ? &entry.cuda->progress()->numbers : &entry.numbers;
}

int64_t ScalerAccess::round(const GradScaler& scaler) { return scaler.impl_->order.round(); }

// A constant scale cannot have changed, so a late backward does no harm.
void ScalerAccess::gradients_added(GradScaler& scaler, int64_t round) {
  CallOrder& order = scaler.impl_->order;
  const bool constant = scaler.policy().if_static() != nullptr;
  require(round == order.round() || constant, ErrorCode::kWrongOrder,
          "backward() was called on a loss that was scaled before the last update(), with a scale "
          "that may have changed; run backward before update().");
  order.gradients_added();
}

StepReport ScalerAccess::step(GradScaler& scaler, Optimizer& optimizer, const StepOptions& options,
                              const ExternalScale& external) {
  const ScalerOptions& own = scaler.impl_->options;
  require(!external.given() || (!own.enabled && own.ranks == nullptr), ErrorCode::kInvalidArgument,
          "An external scale needs a disabled scaler without ranks.");
  return scaler.impl_->step(optimizer, options, external);
}

// Keeps all counts, as torch.amp.GradScaler.update(new_scale) does. Headroom's rule begins again:
// its memory is about scales near the old one.
void ScalerAccess::set_scale(GradScaler& scaler, float scale, const char* call) {
  if (!scaler.enabled()) return;
  const ScalePolicy& policy = scaler.policy();
  require(policy.allows(scale), ErrorCode::kInvalidArgument, [&] {
    return "A scale of " + number(scale) + " cannot be set; the policy allows " +
           allowed_scales(policy) + ".";
  });
  ScaleRecord next{policy, scaler.impl_->numbers()};
  next.numbers.scale = next.numbers.dynamic.pending = scale;
  next.numbers.headroom = {};
  scaler.impl_->replace(next, call);
}

// Checks everything before the first change. Any problem of the record is Error(kBadState).
void ScalerAccess::set_record(GradScaler& scaler, const ScaleRecord& record, const char* call) {
  try {
    scaler.impl_->check_policy(record.policy);
  } catch (const Error& error) {
    throw Error(ErrorCode::kBadState,
                std::string("The saved policy cannot be used here: ") + error.what());
  }
  check_numbers(record.policy, record.numbers);
  scaler.impl_->replace(record, call);
}

StepReport ScalerAccess::skip(GradScaler& scaler, Optimizer& optimizer, const StepOptions& options,
                              const std::string& culprit) {
  return scaler.impl_->skip(optimizer, options, culprit);
}

}  // namespace internal
}  // namespace headroom
