#include "apply/fused.h"

#include <headroom/measure.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <string>

#include "apply/arena.h"
#include "apply/checks.h"
#include "apply/follow.h"
#include "core/check.h"
#include "core/float_environment.h"
#include "core/parallel.h"

namespace headroom {
namespace internal {
namespace {

std::string name_of(const Parameter& parameter, size_t index) {
  return parameter.name.empty() ? std::to_string(index) : parameter.name;
}

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

bool has_master(WeightKind kind);

// Arrays that the caller has given have to be those that the rule needs: all moments or none.
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

bool has_master(WeightKind kind) {
  return kind == WeightKind::kF16Master || kind == WeightKind::kBF16Master;
}

uint32_t random_key(const Precision& precision, size_t parameter, int64_t steps, uint64_t index) {
  return random_key_at(random_base(precision.seed, parameter, steps), index);
}

TensorView master_view(const Slot& slot, const TensorView& weight) {
  return view(static_cast<void*>(slot.master), DType::kF32, weight.count, weight.device);
}

// From any memory to any other.
void copy_bytes(const TensorView& to, const TensorView& from) {
  if (from.count == 0) return;
  const bool from_cuda = from.device.type == DeviceType::kCUDA;
  if (from_cuda || to.device.type == DeviceType::kCUDA) {
    cuda_copy((from_cuda ? from : to).device.index, to.data, from.data, from.bytes());
  } else {
    std::memmove(to.data, from.data, from.bytes());
  }
}
void copy_bytes(float* to, const TensorView& from) { copy_bytes(view(to, from.count), from); }

void copy_to_master(const TensorView& weight, const Slot& slot) {
  if (has_master(slot.kind)) convert(weight, master_view(slot, weight));
}

// Writes a 16-bit weight from its master, rounded just as the last step did.
void copy_from_master(const TensorView& weight, size_t parameter, const Slot& slot,
                      const Precision& precision) {
  if (weight.dtype != DType::kBF16 || !precision.stochastic_rounding || slot.steps == 0) {
    convert(master_view(slot, weight), weight);
    return;
  }
  std::vector<float> master(static_cast<size_t>(weight.count));
  std::vector<bf16> rounded(master.size());
  copy_bytes(master.data(), master_view(slot, weight));
  for (size_t i = 0; i < master.size(); ++i) {
    const uint32_t key = random_key(precision, parameter, slot.steps - 1, i);
    rounded[i] = round_stochastic(master[i], static_cast<uint32_t>(i), key);
  }
  copy_bytes(weight, view(rounded));
}

// Takes over what is not the master's own rounding.
void follow(const TensorView& weight, const Slot& slot, bool at_random) {
  if (weight.device.type == DeviceType::kCUDA) {
    cuda_follow(weight, slot.master, at_random);
    return;
  }
  constexpr int64_t kPiece = 1 << 18;
  std::vector<uint16_t> rounded(static_cast<size_t>(std::min(weight.count, kPiece)));
  std::vector<uint16_t> written(rounded.size());
  std::vector<float> wide(rounded.size());
  const auto* const bytes = static_cast<const char*>(weight.data);  // of any alignment
  for (int64_t first = 0; first < weight.count; first += kPiece) {
    const int64_t count = std::min(weight.count - first, kPiece);
    float* const master = slot.master + first;
    convert(view(master, count), view(static_cast<void*>(rounded.data()), weight.dtype, count));
    const void* const values = bytes + first * sizeof(uint16_t);
    convert(view(values, weight.dtype, count), view(wide.data(), count));
    std::memcpy(written.data(), values, static_cast<size_t>(count) * sizeof(uint16_t));
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(i);
      if (!came_from(master[i], written[at], rounded[at], at_random)) master[i] = wide[at];
    }
  }
}

void prepare_numbers(const std::vector<Parameter>& parameters, float multiplier,
                     FusedState* state) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Slot& slot = state->slots[i];
    const bool same =
        i > 0 && slot.group == state->slots[i - 1].group && slot.steps == state->slots[i - 1].steps;
    state->numbers[i] = same ? state->numbers[i - 1]
                             : rule_numbers(state->groups[slot.group], slot.steps, multiplier);
  }
  if (!state->precision.stochastic_rounding) return;
  for (size_t i = 0; i < state->spans.size(); ++i) {
    const size_t owner = state->owners[i];
    const auto* base = static_cast<const uint16_t*>(parameters[owner].weight.data);
    ApplySpan& span = state->spans[i];
    if (span.weight == nullptr) continue;
    const auto first = static_cast<uint64_t>(static_cast<const uint16_t*>(span.weight) - base);
    span.random_key = random_key(state->precision, owner, state->slots[owner].steps, first);
  }
}

// The tensors of a saved state, in the order of parameters.
std::vector<NamedTensor> state_tensors(const std::vector<Parameter>& parameters,
                                       const FusedState& state) {
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Slot& slot = state.slots[i];
    const std::string name = name_of(parameters[i], i) + "/";
    const TensorView& weight = parameters[i].weight;
    const auto view_of = [&](float* data) {
      return view(static_cast<void*>(data), DType::kF32, weight.count, weight.device);
    };
    if (has_master(slot.kind)) tensors.push_back({name + "master", view_of(slot.master), i});
    const Rule rule = state.groups[slot.group].rule;
    for (size_t b = 0; b < state_buffers(rule); ++b) {
      tensors.push_back({name + state_name(rule, b), view_of(slot.state[b]), i});
    }
  }
  return tensors;
}

const Slot& slot_at(const FusedState& state, size_t index) {
  require(index < state.slots.size(), ErrorCode::kInvalidArgument, [&] {
    return "There is no parameter " + std::to_string(index) + "; there are " +
           std::to_string(state.slots.size()) + ".";
  });
  return state.slots[index];
}

// A variance that is negative would make the next step NaN.
bool has_negative(const TensorView& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.count));
  copy_bytes(values.data(), tensor);
  return std::any_of(values.begin(), values.end(), [](float value) { return value < 0.0f; });
}

void check_steps(int64_t steps, ErrorCode code) {
  require(steps >= 0 && steps <= kMaxCount, code, [&] {
    return "A step count of " + std::to_string(steps) +
           " is impossible; it is damaged, or not a number of steps.";
  });
}

void check_state_tensor(const NamedTensor& mine, const NamedTensor& other) {
  require(mine.name == other.name, ErrorCode::kBadState, [&] {
    return "The saved state has '" + other.name + "' where this optimizer has '" + mine.name +
           "'; it belongs to another model or optimizer.";
  });
  std::string why = unusable(other.tensor, Access::kRead);
  if (why.empty()) why = misplaced(other.tensor);
  require(why.empty(), ErrorCode::kBadState,
          [&] { return "Saved tensor '" + other.name + "'" + why; });
  require(other.tensor.dtype == DType::kF32 && other.tensor.count == mine.tensor.count,
          ErrorCode::kBadState, [&] {
            return "Saved tensor '" + other.name + "' has " + std::to_string(other.tensor.count) +
                   " elements of type " + to_string(other.tensor.dtype) +
                   "; this optimizer needs " + std::to_string(mine.tensor.count) + " of f32.";
          });
  require(measure({other.tensor}).finite(), ErrorCode::kBadState, [&] {
    return "Saved tensor '" + other.name + "' holds inf or nan; the state is damaged.";
  });
  const bool variance = mine.name.ends_with(std::string("/") + state_name(Rule::kAdam, 1));
  require(!variance || !has_negative(other.tensor), ErrorCode::kBadState, [&] {
    return "Saved tensor '" + other.name + "' has negative values; the state is damaged.";
  });
}

}  // namespace

void FusedState::set_steps(const std::vector<int64_t>& steps) {
  if (steps_there) {
    for (auto& [device, apply] : cuda) apply.set_steps(steps);
  }
  for (size_t i = 0; i < slots.size(); ++i) slots[i].steps = steps[i];
}

}  // namespace internal

using internal::require;

FusedOptimizer::FusedOptimizer(const Precision& precision)
    : Optimizer({}), state_(std::make_unique<internal::FusedState>()) {
  own().precision = precision;
}

FusedOptimizer::~FusedOptimizer() = default;
FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;

internal::FusedState& FusedOptimizer::own() const {
  internal::check_whole(state_ != nullptr);
  return *state_;
}

size_t FusedOptimizer::append_group(std::vector<Parameter> added,
                                    const internal::RuleSettings& settings) {
  const internal::DefaultFloatEnvironment environment;
  internal::fetch_steps(parameters(), &own());
  std::vector<Parameter> all = parameters();
  all.insert(all.end(), added.begin(), added.end());
  internal::check_parameters(all, parameters());  // before memory is taken for what they claim
  const size_t buffers = internal::state_buffers(settings.rule);
  std::vector<internal::Slot> slots = own().slots;
  std::map<int, internal::Arena> arenas;  // by device, -1 for the CPU
  const auto arena_of = [&](const TensorView& weight) -> internal::Arena& {
    return arenas[weight.device.type == DeviceType::kCUDA ? weight.device.index : -1];
  };
  for (size_t i = slots.size(); i < all.size(); ++i) {
    const internal::WeightKind kind = internal::kind_of(all[i], i, own().precision);
    internal::check_grad(all[i], i);
    slots.push_back({own().groups.size(), kind, nullptr, {nullptr, nullptr}, 0});
    internal::check_given_arrays(all[i], i, kind, buffers);
    const bool master = internal::has_master(kind) && all[i].master.data == nullptr;
    const bool moments = all[i].first_moment.data == nullptr;
    arena_of(all[i].weight).plan(all[i].weight.count, master, moments);
  }
  internal::FusedState fresh;  // what is taken, until nothing can throw any more
  for (auto& [device, arena] : arenas) {
    const Device where{device < 0 ? DeviceType::kCPU : DeviceType::kCUDA, std::max(device, 0)};
    arena.allocate(where, buffers, &fresh);
  }
  for (size_t i = own().slots.size(); i < slots.size(); ++i) {
    const TensorView& weight = all[i].weight;
    internal::Slot& slot = slots[i];
    if (slot.kind == internal::WeightKind::kF32) slot.master = static_cast<float*>(weight.data);
    if (internal::has_master(slot.kind)) {
      slot.master = static_cast<float*>(all[i].master.data);
    }
    if (internal::has_master(slot.kind) && slot.master == nullptr) {
      slot.master = arena_of(weight).take(0, weight.count);
      internal::copy_to_master(weight, slot);
    }
    for (size_t b = 0; b < buffers; ++b) {
      slot.state[b] =
          static_cast<float*>((b == 0 ? all[i].first_moment : all[i].second_moment).data);
      if (slot.state[b] == nullptr) slot.state[b] = arena_of(weight).take(b + 1, weight.count);
    }
  }
  internal::settle_devices(added);
  // All that can throw comes before the first change.
  own().memory.reserve(own().memory.size() + fresh.memory.size());
  own().cuda_memory.reserve(own().cuda_memory.size() + fresh.cuda_memory.size());
  own().groups.reserve(own().groups.size() + 1);
  append(std::move(added));
  std::move(fresh.memory.begin(), fresh.memory.end(), std::back_inserter(own().memory));
  std::move(fresh.cuda_memory.begin(), fresh.cuda_memory.end(),
            std::back_inserter(own().cuda_memory));
  own().groups.push_back(settings);
  own().slots = std::move(slots);
  own().planned = own().devices_planned = false;
  own().steps_there = false;
  return own().groups.size() - 1;
}

void FusedOptimizer::change_group(size_t group, const internal::RuleSettings& settings) {
  require(settings.rule == own().groups[group].rule, ErrorCode::kInvalidArgument, [] {
    return "momentum cannot be turned on or off in a group that exists; make a new optimizer, or "
           "keep it above 0.";
  });
  own().groups[group] = settings;
  for (auto& [device, cuda] : own().cuda) cuda.set_groups(own().groups);
}

void FusedOptimizer::set_grad(size_t index, const TensorView& grad) {
  if (index < parameters().size()) {
    Parameter changed = parameters()[index];
    changed.grad = grad;
    internal::check_grad(changed, index);
  }
  Optimizer::set_grad(index, grad);
  own().planned = own().devices_planned = false;
}

void FusedOptimizer::rebind(std::vector<Parameter> changed) {
  require(changed.size() == parameters().size(), ErrorCode::kMismatch, [&] {
    return "rebind got " + std::to_string(changed.size()) + " parameters, but there are " +
           std::to_string(parameters().size()) + ".";
  });
  std::vector<size_t> moved;
  for (size_t i = 0; i < changed.size(); ++i) {
    const TensorView& before = parameters()[i].weight;
    const TensorView& after = changed[i].weight;
    internal::check_grad(changed[i], i);
    const bool there =
        after.device.type == before.device.type && after.device.index == before.device.index;
    require(there || after.count == 0, ErrorCode::kMismatch, [&] {
      return "The weight of parameter " + internal::name_of(changed[i], i) +
             " has moved to another device, where its masters and moments are not; make a new "
             "optimizer for it.";
    });
    require(after.dtype == before.dtype && after.count == before.count, ErrorCode::kMismatch, [&] {
      return "The weight of parameter " + internal::name_of(changed[i], i) + " was " +
             std::to_string(before.count) + " elements of " + to_string(before.dtype) +
             " and is now " + std::to_string(after.count) + " of " + to_string(after.dtype) +
             "; make a new optimizer for it.";
    });
    if (after.data != before.data) moved.push_back(i);
  }
  for (size_t i = 0; i < changed.size(); ++i) {  // masters and moments stay where they are
    changed[i].master = parameters()[i].master;
    changed[i].first_moment = parameters()[i].first_moment;
    changed[i].second_moment = parameters()[i].second_moment;
  }
  Optimizer::rebind(std::move(changed));
  own().planned = own().devices_planned = false;
  for (const size_t i : moved) {
    internal::Slot& slot = own().slots[i];
    if (slot.kind == internal::WeightKind::kF32) {
      slot.master = static_cast<float*>(parameters()[i].weight.data);
    }
    follow_weight(i);
  }
  if (!moved.empty()) internal::settle_devices(parameters());
}

void FusedOptimizer::apply(float multiplier, bool clear_grads) {
  const internal::DefaultFloatEnvironment environment;
  if (!own().planned) internal::make_plan(parameters(), &own());
  internal::prepare_numbers(parameters(), multiplier, &own());
  const internal::ApplyKernels& kernels = internal::apply_kernels();
  const internal::ApplyJob job{clear_grads, own().precision.stochastic_rounding};
  internal::parallel_for(own().jobs.size(), own().bytes, [&](size_t i) {
    const internal::FusedState::Job& work = own().jobs[i];
    kernels.by_type[static_cast<size_t>(work.rule)][static_cast<size_t>(work.grad)]
                   [static_cast<size_t>(work.kind)](own().spans.data() + work.begin,
                                                    work.end - work.begin, job);
  });
  internal::prepare_devices(parameters(), &own());
  for (auto& [device, cuda] : own().cuda) {
    cuda.prepare(multiplier);
    cuda.step(job, false);
  }
  for (size_t i = 0; i < own().slots.size(); ++i) {
    if (parameters()[i].grad.data != nullptr) ++own().slots[i].steps;
  }
}

internal::CudaApply* FusedOptimizer::cuda_side(int device, internal::ApplyJob* job) {
  const bool all_there =
      std::all_of(parameters().begin(), parameters().end(), [&](const Parameter& parameter) {
        return parameter.weight.device.type == DeviceType::kCUDA &&
               parameter.weight.device.index == device;
      });
  if (!all_there || parameters().empty()) return nullptr;
  internal::prepare_devices(parameters(), &own());
  own().counts_alone = true;
  job->stochastic_rounding = own().precision.stochastic_rounding;
  return &own().cuda[device];
}

int64_t FusedOptimizer::steps(size_t index) const {
  internal::fetch_steps(parameters(), &own());
  return internal::slot_at(own(), index).steps;
}

void FusedOptimizer::set_steps(int64_t steps) {
  internal::check_steps(steps, ErrorCode::kInvalidArgument);
  internal::fetch_steps(parameters(), &own());
  own().set_steps(std::vector<int64_t>(own().slots.size(), steps));
  internal::settle_devices(parameters());
}

const float* FusedOptimizer::master(size_t index) const {
  return internal::slot_at(own(), index).master;
}

void FusedOptimizer::refresh_masters() {
  for (size_t i = 0; i < own().slots.size(); ++i) {
    internal::copy_to_master(parameters()[i].weight, own().slots[i]);
  }
  internal::settle_devices(parameters());
}

void FusedOptimizer::refresh_master(size_t index) {
  const internal::Slot& slot = internal::slot_at(own(), index);
  internal::copy_to_master(parameters()[index].weight, slot);
  internal::settle_devices({parameters()[index]});
}

void FusedOptimizer::follow_weight(size_t index) {
  const internal::DefaultFloatEnvironment environment;
  const internal::Slot& slot = internal::slot_at(own(), index);
  if (!internal::has_master(slot.kind)) return;
  const bool at_random =
      slot.kind == internal::WeightKind::kBF16Master && own().precision.stochastic_rounding;
  internal::follow(parameters()[index].weight, slot, at_random);
}

OptimizerState FusedOptimizer::state() const {
  internal::fetch_steps(parameters(), &own());
  OptimizerState state;
  for (const internal::Slot& slot : own().slots) state.steps.push_back(slot.steps);
  state.tensors = internal::state_tensors(parameters(), own());
  return state;
}

void FusedOptimizer::load_state(const OptimizerState& saved) {
  const std::vector<NamedTensor> mine = internal::state_tensors(parameters(), own());
  require(saved.steps.size() == own().slots.size() && saved.tensors.size() == mine.size(),
          ErrorCode::kBadState, [&] {
            return "The saved state has " + std::to_string(saved.steps.size()) +
                   " parameters and " + std::to_string(saved.tensors.size()) +
                   " tensors; this optimizer has " + std::to_string(own().slots.size()) + " and " +
                   std::to_string(mine.size()) + ".";
          });
  for (const int64_t steps : saved.steps) internal::check_steps(steps, ErrorCode::kBadState);
  for (size_t i = 0; i < mine.size(); ++i) internal::check_state_tensor(mine[i], saved.tensors[i]);
  for (size_t i = 0; i < mine.size(); ++i) {
    internal::copy_bytes(mine[i].tensor, saved.tensors[i].tensor);
  }
  own().set_steps(saved.steps);
  for (size_t i = 0; i < own().slots.size(); ++i) {
    const internal::Slot& slot = own().slots[i];
    if (!internal::has_master(slot.kind)) continue;
    internal::copy_from_master(parameters()[i].weight, i, slot, own().precision);
  }
  internal::settle_devices(parameters());
}

}  // namespace headroom
