// FusedOptimizer: groups, memory and steps of SGD, Adam, AdamW and Lion.
#include "apply/fused.h"

#include <algorithm>
#include <string>

#include "apply/checks.h"
#include "core/check.h"
#include "core/float_environment.h"
#include "core/parallel.h"

namespace headroom {
namespace internal {
namespace {

WeightKind kind_of(const Parameter& parameter, size_t index, const Precision& precision) {
  switch (parameter.weight.dtype) {
    case DType::kF32:
      return WeightKind::kF32;
    case DType::kF16:
      return precision.master_weights ? WeightKind::kF16Master : WeightKind::kF16;
    case DType::kBF16:
      return precision.master_weights ? WeightKind::kBF16Master : WeightKind::kBF16;
    case DType::kF64:
      break;
  }
  throw Error(ErrorCode::kUnsupported, "The weight of parameter " + name_of(parameter, index) +
                                           " is f64; the optimizers compute in FP32 and take f16, "
                                           "bf16 and f32 weights.");
}

// What the fused optimizers require beyond check_parameters().
void check_grad(const Parameter& parameter, size_t index) {
  const TensorView& grad = parameter.grad;
  const auto name = [&] { return name_of(parameter, index); };
  require(parameter.weight.count > 0 || grad.count == 0, ErrorCode::kMismatch,
          [&] { return "Parameter " + name() + " has a gradient but no weight."; });
  require(grad.dtype != DType::kF64 || grad.count == 0, ErrorCode::kUnsupported, [&] {
    return "The gradient of parameter " + name() +
           " is f64; the optimizers compute in FP32 and take f16, bf16 and f32 gradients.";
  });
}

// The caller may provide a master only where there is one, and either all moments of the rule or
// none.
void check_given_arrays(const Parameter& parameter, size_t index, WeightKind kind, size_t buffers) {
  require(parameter.master.data == nullptr || has_master(kind), ErrorCode::kMismatch, [&] {
    return "Parameter " + name_of(parameter, index) +
           " was given a master, but its weight is f32 or kept without masters; leave it out.";
  });
  const bool first = parameter.first_moment.data != nullptr;
  const bool second = parameter.second_moment.data != nullptr;
  require((!first || buffers > 0) && second == (first && buffers > 1), ErrorCode::kMismatch, [&] {
    return "Parameter " + name_of(parameter, index) +
           " was given moments that this optimizer does not have, or only some of them; it has " +
           std::to_string(buffers) + ".";
  });
}

// Arrays that the caller provides are FP32.
void check_format(const Parameter& parameter, size_t index, const Precision& precision) {
  const bool given = parameter.master.data != nullptr || parameter.first_moment.data != nullptr;
  require(!given || precision.state == StateFormat::kFull, ErrorCode::kUnsupported, [&] {
    return "Parameter " + name_of(parameter, index) +
           " was given a master or moments, which are FP32, but the optimizer's state is '" +
           to_string(precision.state) + "'; leave them out, or use 'full'.";
  });
}

void check_precision(const Precision& precision) {
  if (precision.state == StateFormat::kFull) return;
  require(precision.master_weights && !precision.stochastic_rounding, ErrorCode::kInvalidArgument,
          [&] {
            return std::string("State '") + to_string(precision.state) +
                   "' stores masters together with weights rounded to nearest; it needs "
                   "master_weights and no stochastic_rounding.";
          });
}

// Computes the numbers of the next step, and the keys for stochastic rounding, for the CPU kernels.
// Neighbours in one group usually have the same step count and share their numbers.
void prepare_numbers(const std::vector<Parameter>& parameters, float multiplier,
                     FusedState* state) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Slot& slot = state->slots[i];
    const bool same =
        i > 0 && slot.group == state->slots[i - 1].group && slot.steps == state->slots[i - 1].steps;
    state->numbers[i] = same ? state->numbers[i - 1]
                             : rule_numbers(state->groups[slot.group], slot.steps, multiplier);
  }
  const bool compact = state->precision.state != StateFormat::kFull;
  if (!compact && !state->precision.stochastic_rounding) return;
  for (size_t i = 0; i < state->spans.size(); ++i) {
    const size_t owner = state->owners[i];
    ApplySpan& span = state->spans[i];
    if (!compact && span.weight == nullptr) continue;
    const TensorView& grad = parameters[owner].grad;
    const auto* const base = static_cast<const char*>(grad.data);
    const auto bytes = static_cast<uint64_t>(static_cast<const char*>(span.grad) - base);
    span.random_key =
        random_key(state->precision, owner, state->slots[owner].steps, bytes / size_of(grad.dtype));
  }
}

// The slot of a parameter in a group with these settings, with the arrays that the caller provides.
Slot make_slot(const Parameter& parameter, size_t index, size_t group, const RuleSettings& settings,
               const Precision& precision) {
  const WeightKind kind = kind_of(parameter, index, precision);
  check_grad(parameter, index);
  check_given_arrays(parameter, index, kind, state_buffers(settings.rule));
  check_format(parameter, index, precision);
  const TensorView& master = kind == WeightKind::kF32 ? parameter.weight : parameter.master;
  return {.group = group,
          .kind = kind,
          .format = precision.state,
          .arrays = {.master = master.data,
                     .moments = {parameter.first_moment.data, parameter.second_moment.data},
                     .exponents = {}},
          .steps = 0};
}

// Throws Error(kInvalidArgument) if there is no such parameter.
const Slot& slot_at(const FusedState& state, size_t index) {
  require(index < state.slots.size(), ErrorCode::kInvalidArgument, [&] {
    return "There is no parameter " + std::to_string(index) + "; there are " +
           std::to_string(state.slots.size()) + ".";
  });
  return state.slots[index];
}

}  // namespace

std::string name_of(const Parameter& parameter, size_t index) {
  return parameter.name.empty() ? std::to_string(index) : parameter.name;
}

uint32_t random_key(const Precision& precision, size_t parameter, int64_t steps, uint64_t index) {
  return random_key_at(random_base(precision.seed, parameter, steps), index);
}

void check_steps(int64_t steps, ErrorCode code) {
  require(steps >= 0 && steps <= kMaxCount, code, [&] {
    return "A step count of " + std::to_string(steps) +
           " is invalid. If it is from a checkpoint, load an earlier one.";
  });
}

void FusedState::set_steps(const std::vector<int64_t>& steps) {
  if (steps_uploaded) {
    for (auto& [device, apply] : cuda) apply.set_steps(steps);
  }
  for (size_t i = 0; i < slots.size(); ++i) slots[i].steps = steps[i];
}

}  // namespace internal

using namespace internal;

FusedOptimizer::FusedOptimizer(const Precision& precision)
    : Optimizer({}), state_(std::make_unique<FusedState>()) {
  check_precision(precision);
  own().precision = precision;
}

FusedOptimizer::~FusedOptimizer() = default;
FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;

FusedState& FusedOptimizer::own() const {
  check_not_moved_from(state_ != nullptr);
  return *state_;
}

// Strong exception guarantee: memory is allocated and filled first, and committed last.
size_t FusedOptimizer::append_group(std::vector<Parameter> added, const RuleSettings& settings) {
  const DefaultFloatEnvironment environment;
  FusedState& state = own();
  fetch_steps(parameters(), &state);
  std::vector<Parameter> all = parameters();
  all.insert(all.end(), added.begin(), added.end());
  check_parameters(all, parameters());  // before memory is allocated for the sizes they claim
  FusedState staged;
  staged.groups = state.groups;
  staged.groups.push_back(settings);
  staged.slots = state.slots;
  staged.memory = state.memory;
  staged.allocated = state.allocated;
  for (size_t i = state.slots.size(); i < all.size(); ++i) {
    staged.slots.push_back(make_slot(all[i], i, state.groups.size(), settings, state.precision));
  }
  if (!state.allocator) allocate_slots(all, &staged);
  append(std::move(added));  // the last call that can throw
  state.groups = std::move(staged.groups);
  state.slots = std::move(staged.slots);
  state.memory = std::move(staged.memory);
  state.allocated = staged.allocated;
  state.invalidate_plan();
  state.steps_uploaded = false;
  return state.groups.size() - 1;
}

void FusedOptimizer::set_allocator(StateAllocator allocator) {
  allocate();  // the earlier groups, with the earlier allocator
  own().allocator = std::move(allocator);
}

void FusedOptimizer::allocate() {
  if (own().allocated == own().slots.size()) return;
  const DefaultFloatEnvironment environment;
  allocate_slots(parameters(), &own());
}

size_t FusedOptimizer::allocated() const { return own().allocated; }

// The number of state buffers depends on the rule, so the rule of a group cannot change.
void FusedOptimizer::change_group(size_t group, const RuleSettings& settings) {
  require(settings.rule == own().groups[group].rule, ErrorCode::kInvalidArgument,
          "momentum cannot be turned on or off in a group that exists; make a new optimizer, or "
          "keep it above 0.");
  own().groups[group] = settings;
  for (auto& [device, cuda] : own().cuda) cuda.set_groups(own().groups);
}

void FusedOptimizer::set_grad(size_t index, const TensorView& grad) {
  if (index < parameters().size()) {
    Parameter changed = parameters()[index];
    changed.grad = grad;
    check_grad(changed, index);
  }
  Optimizer::set_grad(index, grad);
  own().invalidate_plan();
}

// Checks everything before the first change. Masters and moments that exist stay where they are;
// only weights and gradients can move.
void FusedOptimizer::rebind(std::vector<Parameter> changed) {
  require(changed.size() == parameters().size(), ErrorCode::kMismatch, [&] {
    return "rebind got " + std::to_string(changed.size()) + " parameters, but there are " +
           std::to_string(parameters().size()) + ".";
  });
  std::vector<Slot> slots = own().slots;
  std::vector<size_t> moved;  // weights whose masters exist
  for (size_t i = 0; i < changed.size(); ++i) {
    const TensorView& before = parameters()[i].weight;
    const TensorView& after = changed[i].weight;
    const bool exists = i < own().allocated;
    changed[i].master = parameters()[i].master;  // rebinding does not change masters and moments
    changed[i].first_moment = parameters()[i].first_moment;
    changed[i].second_moment = parameters()[i].second_moment;
    check_grad(changed[i], i);
    const bool same_place = same_device(after.device, before.device) || after.count == 0;
    require(same_place || !exists, ErrorCode::kMismatch, [&] {
      return "The weight of parameter " + name_of(changed[i], i) +
             " has moved to another device, where its masters and moments are not; make a new "
             "optimizer for it.";
    });
    const bool same_type = after.dtype == before.dtype || !exists;
    require(same_type && after.count == before.count, ErrorCode::kMismatch, [&] {
      return "The weight of parameter " + name_of(changed[i], i) + " was " +
             std::to_string(before.count) + " elements of " + to_string(before.dtype) +
             " and is now " + std::to_string(after.count) + " of " + to_string(after.dtype) +
             "; make a new optimizer for it.";
    });
    if (!exists) {
      const Slot& old = slots[i];
      slots[i] = make_slot(changed[i], i, old.group, own().groups[old.group], own().precision);
      slots[i].steps = old.steps;
    } else if (after.data != before.data) {
      if (slots[i].kind == WeightKind::kF32) slots[i].arrays.master = after.data;
      moved.push_back(i);
    }
  }
  Optimizer::rebind(std::move(changed));
  own().slots = std::move(slots);
  own().invalidate_plan();
  for (const size_t i : moved) follow_weight(i);
  if (!moved.empty()) wait_for_devices(parameters());
}

// One step of all parameters. Those on CUDA devices are enqueued after the CPU's are done.
void FusedOptimizer::apply(float multiplier, bool clear_grads) {
  const DefaultFloatEnvironment environment;
  allocate();
  FusedState& state = own();
  const std::vector<Parameter>& all = parameters();
  if (!state.planned) make_plan(all, &state);
  prepare_numbers(all, multiplier, &state);
  find_written(all, &state);
  prepare_devices(all, &state);  // the last call that can throw before weights change
  const ApplyJob job{clear_grads, state.precision.stochastic_rounding};
  parallel_for(state.jobs.size(), state.bytes, [&](size_t i) {
    const FusedState::Job& work = state.jobs[i];
    const ApplyFunction function = apply_function(work.kind);
    function(state.spans.data() + work.begin, work.end - work.begin, job);
  });
  for (auto& [device, cuda] : state.cuda) {
    cuda.prepare(multiplier);
    cuda.step(job, false);
  }
  // The devices have counted the step as well, so that both counts stay equal.
  for (size_t i = 0; i < state.slots.size(); ++i) {
    if (all[i].grad.data != nullptr) ++state.slots[i].steps;
  }
}

// From here on the device counts the applied steps, because its verdicts are not on the host.
CudaApply* FusedOptimizer::cuda_side(int device, ApplyJob* job) {
  const bool all_there =
      std::all_of(parameters().begin(), parameters().end(), [&](const Parameter& parameter) {
        return parameter.weight.device.type == DeviceType::kCUDA &&
               parameter.weight.device.index == device;
      });
  if (!all_there || parameters().empty()) return nullptr;
  allocate();
  prepare_devices(parameters(), &own());
  own().device_counts_steps = true;
  job->stochastic_rounding = own().precision.stochastic_rounding;
  return &own().cuda[device];
}

int64_t FusedOptimizer::steps(size_t index) const {
  fetch_steps(parameters(), &own());
  return slot_at(own(), index).steps;
}

void FusedOptimizer::set_steps(int64_t steps) {
  check_steps(steps, ErrorCode::kInvalidArgument);
  fetch_steps(parameters(), &own());
  own().set_steps(std::vector<int64_t>(own().slots.size(), steps));
  wait_for_devices(parameters());
}

const float* FusedOptimizer::master(size_t index) const {
  const Slot& slot = slot_at(own(), index);
  if (has_master(slot.kind) && !has_separate_master(slot)) return nullptr;
  return static_cast<const float*>(slot.arrays.master);
}

void FusedOptimizer::refresh_masters() {
  for (size_t i = 0; i < own().allocated; ++i) {  // others are made from the weights later
    copy_to_master(parameters()[i].weight, own().slots[i]);
  }
  wait_for_devices(parameters());
}

void FusedOptimizer::refresh_master(size_t index) {
  const Slot& slot = slot_at(own(), index);
  if (index >= own().allocated) return;
  copy_to_master(parameters()[index].weight, slot);
  wait_for_devices({parameters()[index]});
}

void FusedOptimizer::follow_weight(size_t index) {
  const DefaultFloatEnvironment environment;
  const Slot& slot = slot_at(own(), index);
  if (!has_separate_master(slot) || index >= own().allocated) return;
  follow(parameters()[index].weight, slot, own().precision);
}

}  // namespace headroom
