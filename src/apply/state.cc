// FusedOptimizer: saved states, always FP32 outside of the optimizer, and the formats' names.
#include <headroom/measure.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "apply/compact_state.h"
#include "apply/fused.h"
#include "core/check.h"
#include "core/float_environment.h"

namespace headroom {
namespace internal {
namespace {

// A tensor of a saved state.
struct Entry {
  std::string name;
  size_t parameter;
  size_t moment;  // or kMaster
};
constexpr size_t kMaster = ~size_t{0};

// In the order of the parameters.
std::vector<Entry> entries_of(const std::vector<Parameter>& parameters, const FusedState& state) {
  std::vector<Entry> entries;
  for (size_t i = 0; i < state.allocated; ++i) {
    const Slot& slot = state.slots[i];
    const std::string name = name_of(parameters[i], i) + "/";
    if (has_master(slot.kind)) entries.push_back({name + "master", i, kMaster});
    const Rule rule = state.groups[slot.group].rule;
    for (size_t b = 0; b < state_buffers(rule); ++b) {
      entries.push_back({name + state_name(rule, b), i, b});
    }
  }
  return entries;
}

// The FP32 array of an entry of a slot with StateFormat::kFull.
TensorView full_array(const Parameter& parameter, const Slot& slot, size_t moment) {
  void* const data = moment == kMaster ? slot.arrays.master : slot.arrays.moments[moment];
  return view_like(parameter.weight, static_cast<float*>(data));
}

// Copies between host and device memory in any direction; waits for a device.
void copy_bytes(const TensorView& to, const TensorView& from) {
  if (from.count == 0) return;
  const bool from_cuda = from.device.type == DeviceType::kCUDA;
  copy_memory(from_cuda ? from.device : to.device, to.data, from.data, from.bytes());
}

std::vector<float> host_copy(const TensorView& from) {
  std::vector<float> values(static_cast<size_t>(from.count));
  copy_bytes(view(values), from);
  return values;
}

// Writes a 16-bit weight from its master, rounded exactly as by the last step.
void copy_from_master(const TensorView& weight, size_t parameter, const Slot& slot,
                      const Precision& precision) {
  const TensorView full = view_like(weight, static_cast<float*>(slot.arrays.master));
  if (weight.dtype != DType::kBF16 || !precision.stochastic_rounding || slot.steps == 0) {
    convert(full, weight);
    return;
  }
  // On the host, even for a weight on a device: this only happens when a state is loaded.
  const std::vector<float> master = host_copy(full);
  std::vector<bf16> rounded(master.size());
  for (size_t i = 0; i < master.size(); ++i) {
    const uint32_t key = random_key(precision, parameter, slot.steps - 1, i);
    rounded[i] = round_stochastic(master[i], static_cast<uint32_t>(i), key);
  }
  copy_bytes(weight, view(rounded));
}

// Adam takes the square root of the second moment: a negative one would give NaN weights.
bool has_negative(const TensorView& tensor) {
  const std::vector<float> values = host_copy(tensor);
  return std::any_of(values.begin(), values.end(), [](float value) { return value < 0.0f; });
}

// Throws Error(kBadState) unless `saved` can replace the tensor of this name and size.
void check_state_tensor(const std::string& name, int64_t count, const NamedTensor& saved) {
  require(name == saved.name, ErrorCode::kBadState, [&] {
    return "The saved state has '" + saved.name + "' where this optimizer has '" + name +
           "'; it belongs to another model or optimizer.";
  });
  std::string why = unusable(saved.tensor, Access::kRead);
  if (why.empty()) why = misplaced(saved.tensor);
  require(why.empty(), ErrorCode::kBadState,
          [&] { return "Saved tensor '" + saved.name + "'" + why; });
  require(saved.tensor.dtype == DType::kF32 && saved.tensor.count == count, ErrorCode::kBadState,
          [&] {
            return "Saved tensor '" + saved.name + "' has " + std::to_string(saved.tensor.count) +
                   " elements of type " + to_string(saved.tensor.dtype) +
                   "; this optimizer needs " + std::to_string(count) + " of f32.";
          });
  require(measure({saved.tensor}).finite(), ErrorCode::kBadState, [&] {
    return "Saved tensor '" + saved.name + "' holds inf or nan; the state is damaged.";
  });
  const bool variance = name.ends_with(std::string("/") + state_name(Rule::kAdam, 1));
  require(!variance || !has_negative(saved.tensor), ErrorCode::kBadState, [&] {
    return "Saved tensor '" + saved.name + "' has negative values; the state is damaged.";
  });
}

}  // namespace
}  // namespace internal

using namespace internal;

OptimizerState FusedOptimizer::state() const {
  fetch_steps(parameters(), &own());
  OptimizerState state;
  state.format = own().precision.state;
  for (const Slot& slot : own().slots) state.steps.push_back(slot.steps);
  const auto copies = std::make_shared<std::vector<std::vector<float>>>();
  for (const Entry& entry : entries_of(parameters(), own())) {
    const Parameter& parameter = parameters()[entry.parameter];
    const Slot& slot = own().slots[entry.parameter];
    TensorView values;
    if (slot.format == StateFormat::kFull) {
      values = full_array(parameter, slot, entry.moment);
    } else {
      copies->push_back(entry.moment == kMaster
                            ? decode_master(parameter.weight, slot)
                            : decode_moment(parameter.weight, slot, entry.moment));
      values = view(copies->back());
    }
    state.tensors.push_back({entry.name, values, entry.parameter});
  }
  if (!copies->empty()) state.copies = copies;
  return state;
}

// Checks the whole state before the first change.
void FusedOptimizer::load_state(const OptimizerState& saved) {
  const DefaultFloatEnvironment environment;
  allocate();
  const std::vector<Entry> entries = entries_of(parameters(), own());
  require(saved.steps.size() == own().slots.size() && saved.tensors.size() == entries.size(),
          ErrorCode::kBadState, [&] {
            return "The saved state has " + std::to_string(saved.steps.size()) +
                   " parameters and " + std::to_string(saved.tensors.size()) +
                   " tensors; this optimizer has " + std::to_string(own().slots.size()) + " and " +
                   std::to_string(entries.size()) + ".";
          });
  for (const int64_t steps : saved.steps) check_steps(steps, ErrorCode::kBadState);
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t count = parameters()[entries[i].parameter].weight.count;
    check_state_tensor(entries[i].name, count, saved.tensors[i]);
  }
  own().set_steps(saved.steps);
  for (size_t i = 0; i < entries.size(); ++i) {
    const size_t parameter = entries[i].parameter, moment = entries[i].moment;
    const TensorView& weight = parameters()[parameter].weight;
    const TensorView& from = saved.tensors[i].tensor;
    const Slot& slot = own().slots[parameter];
    if (slot.format != StateFormat::kFull) {
      const bool compact = saved.format != StateFormat::kFull;
      if (moment == kMaster) encode_master(host_copy(from), slot, weight, compact);
      if (moment != kMaster) encode_moment(host_copy(from), slot, moment, weight);
      continue;
    }
    copy_bytes(full_array(parameters()[parameter], slot, moment), from);
    if (moment == kMaster) copy_from_master(weight, parameter, slot, own().precision);
  }
  wait_for_devices(parameters());
}

namespace {
constexpr std::array<const char*, 3> kFormatNames = {"full", "half", "byte"};
}  // namespace

const char* to_string(StateFormat format) { return kFormatNames.at(static_cast<size_t>(format)); }

StateFormat state_format(const std::string& name) {
  for (size_t i = 0; i < kFormatNames.size(); ++i) {
    if (name == kFormatNames[i]) return static_cast<StateFormat>(i);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "State '" + name + "' is unknown; it can be full, half or byte.");
}

}  // namespace headroom
