// Divides an optimizer's parameters on the CPU into spans for the kernels and jobs for the threads.
#include <algorithm>

#include "apply/fused.h"

namespace headroom::internal {
namespace {

// Elements of one job. Stochastic rounding relies on it dividing 2^32: no span crosses an index
// where the upper 32 bits change.
constexpr size_t kJobElements = size_t{1} << 14;

template <typename T>
T* at(T* base, size_t index) {
  return base == nullptr ? nullptr : base + index;
}

ApplySpan make_span(const Parameter& parameter, const Slot& slot, size_t first, size_t count,
                    const RuleNumbers* numbers, const uint8_t* follow) {
  auto* const weight = static_cast<uint16_t*>(parameter.weight.data);
  return {.master = at(slot.master, first),
          .weight = slot.kind == WeightKind::kF32 ? nullptr : weight + first,
          .grad = static_cast<char*>(parameter.grad.data) + first * size_of(parameter.grad.dtype),
          .state = {at(slot.state[0], first), at(slot.state[1], first)},
          .count = count,
          .first_index = static_cast<uint32_t>(first),
          .random_key = 0,
          .numbers = numbers,
          .follow = follow};
}

// Weights that are always compared with their masters as a whole need no samples.
void plan_samples(size_t owner, int64_t count, FusedState* state) {
  constexpr int64_t kJobGroups = 64;
  const int64_t groups = CpuSamples::groups(count);
  for (int64_t first = 0; first < groups && count > CpuSamples::kWhole; first += kJobGroups) {
    state->sample_jobs.push_back({owner, first, std::min(first + kJobGroups, groups)});
  }
}

}  // namespace

void make_plan(const std::vector<Parameter>& parameters, FusedState* state) {
  state->jobs.clear();
  state->spans.clear();
  state->owners.clear();
  state->sample_jobs.clear();
  state->numbers.resize(parameters.size());
  state->follow.resize(parameters.size());
  state->bytes = 0;
  size_t room = 0;  // elements that still fit into the last job
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Slot& slot = state->slots[i];
    const TensorView& grad = parameters[i].grad;
    if (grad.device.type == DeviceType::kCUDA) continue;
    const Rule rule = state->groups[slot.group].rule;
    const auto fits = [&] {
      if (room == 0 || state->jobs.empty()) return false;
      const FusedState::Job& job = state->jobs.back();
      return job.rule == rule && job.grad == grad.dtype && job.kind == slot.kind;
    };
    if (has_master(slot.kind)) plan_samples(i, grad.count, state);
    // State buffers and master are read and written, the gradient is read: an estimate.
    state->bytes += static_cast<size_t>(grad.count) * (8 * state_buffers(rule) + 10);
    for (size_t first = 0; first < static_cast<size_t>(grad.count);) {
      if (!fits()) {
        const size_t begin = state->spans.size();
        state->jobs.push_back({rule, grad.dtype, slot.kind, begin, begin});
        room = kJobElements;
      }
      const size_t block = kJobElements - first % kJobElements;
      const size_t count = std::min({static_cast<size_t>(grad.count) - first, room, block});
      state->spans.push_back(
          make_span(parameters[i], slot, first, count, &state->numbers[i], &state->follow[i]));
      state->owners.push_back(i);
      state->jobs.back().end = state->spans.size();
      first += count;
      room -= count;
    }
  }
  state->planned = true;
}

}  // namespace headroom::internal
