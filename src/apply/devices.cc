// Keeps what CUDA devices know of an optimizer in step with what the host knows.
#include "apply/fused.h"

#include <set>

namespace headroom::internal {
namespace {

bool on_cuda(const Parameter& parameter) {
  return parameter.weight.device.type == DeviceType::kCUDA;
}

CudaSlot cuda_slot(const Parameter& parameter, const Slot& slot, size_t index, Rule rule) {
  CudaSlot there{};
  there.master = slot.master;
  there.weight = slot.kind == WeightKind::kF32 ? nullptr : parameter.weight.data;
  there.grad = parameter.grad.data;
  there.state[0] = slot.state[0];
  there.state[1] = slot.state[1];
  there.count = parameter.grad.count;
  there.parameter = static_cast<uint32_t>(index);
  there.group = static_cast<uint32_t>(slot.group);
  there.rule = rule;
  there.grad_type = parameter.grad.dtype;
  there.kind = slot.kind;
  return there;
}

}  // namespace

void prepare_devices(const std::vector<Parameter>& parameters, FusedState* state) {
  if (state->devices_planned) return;
  std::map<int, std::vector<CudaSlot>> by_device;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!on_cuda(parameters[i])) continue;
    const Slot& slot = state->slots[i];
    by_device[parameters[i].weight.device.index].push_back(
        cuda_slot(parameters[i], slot, i, state->groups[slot.group].rule));
  }
  for (auto& [device, slots] : by_device) {
    CudaApply& cuda = state->cuda[device];
    cuda.set_slots(device, std::move(slots), parameters.size(), state->precision.seed);
    cuda.set_groups(state->groups);
  }
  state->devices_planned = true;
  if (state->steps_there || by_device.empty()) return;
  std::vector<int64_t> steps;
  for (const Slot& slot : state->slots) steps.push_back(slot.steps);
  for (auto& [device, cuda] : state->cuda) cuda.set_steps(steps);
  state->steps_there = true;
}

void settle_devices(const std::vector<Parameter>& parameters) {
  std::set<int> devices;
  for (const Parameter& parameter : parameters) {
    const TensorView& weight = parameter.weight;
    if (on_cuda(parameter) && weight.count > 0) devices.insert(weight.device.index);
  }
  for (const int device : devices) cuda_settle(device);
}

void fetch_steps(const std::vector<Parameter>& parameters, FusedState* state) {
  if (!state->counts_alone) return;
  for (const auto& [device, cuda] : state->cuda) {
    const std::vector<int64_t> steps = cuda.wait_steps(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool its = on_cuda(parameters[i]) && parameters[i].weight.device.index == device;
      if (its) state->slots[i].steps = steps[i];
    }
  }
}

}  // namespace headroom::internal
