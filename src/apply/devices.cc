// Keeps the tables of an optimizer on CUDA devices up to date.
#include <set>

#include "apply/fused.h"

namespace headroom::internal {
namespace {

bool on_cuda(const Parameter& parameter) {
  return parameter.weight.device.type == DeviceType::kCUDA;
}

}  // namespace

// A framework that rebinds in every step gets here in every step: set_slots() and set_groups()
// upload only what has changed.
void prepare_devices(const std::vector<Parameter>& parameters, FusedState* state) {
  if (state->devices_planned) return;
  std::map<int, std::vector<CudaSlot>> by_device;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!on_cuda(parameters[i])) continue;
    const Slot& slot = state->slots[i];
    const TensorView& weight = parameters[i].weight;
    const TensorView& grad = parameters[i].grad;
    by_device[weight.device.index].push_back(
        {.state = slot.arrays,
         .weight = slot.kind == WeightKind::kF32 ? nullptr : weight.data,
         .grad = grad.data,
         .count = grad.count,
         .first_piece = 0,
         .parameter = static_cast<uint32_t>(i),
         .group = static_cast<uint32_t>(slot.group),
         .kind = kernel_kind(slot, state->groups[slot.group].rule, grad.dtype)});
  }
  for (auto& [device, slots] : by_device) {
    CudaApply& cuda = state->cuda[device];
    cuda.set_slots(device, std::move(slots), parameters.size(), state->precision.seed);
    cuda.set_groups(state->groups);
  }
  state->devices_planned = true;
  // Every device gets the counts of all parameters and uses those of its own.
  if (state->steps_uploaded || by_device.empty()) return;
  std::vector<int64_t> steps;
  for (const Slot& slot : state->slots) steps.push_back(slot.steps);
  for (auto& [device, cuda] : state->cuda) cuda.set_steps(steps);
  state->steps_uploaded = true;
}

void wait_for_devices(const std::vector<Parameter>& parameters) {
  std::set<int> devices;
  for (const Parameter& parameter : parameters) {
    const TensorView& weight = parameter.weight;
    if (on_cuda(parameter) && weight.count > 0) devices.insert(weight.device.index);
  }
  for (const int device : devices) cuda_settle(device);
}

void fetch_steps(const std::vector<Parameter>& parameters, FusedState* state) {
  if (!state->device_counts_steps || !state->steps_uploaded) return;
  for (const auto& [device, cuda] : state->cuda) {
    const std::vector<int64_t> steps = cuda.wait_steps(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool on_this = on_cuda(parameters[i]) && parameters[i].weight.device.index == device;
      if (on_this) state->slots[i].steps = steps[i];
    }
  }
}

}  // namespace headroom::internal
