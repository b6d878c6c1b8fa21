#include <algorithm>

#include "apply/fused.h"

namespace headroom::internal {
namespace {

// Elements that one thread updates before it takes more work. Random rounding relies on it dividing
// 2^32: no span crosses a point where the upper half of the index changes.
constexpr size_t kJobElements = size_t{1} << 14;

template <typename T>
T* at(T* base, size_t index) {
  return base == nullptr ? nullptr : base + index;
}

ApplySpan make_span(const Parameter& parameter, const Slot& slot, size_t first, size_t count,
                    const RuleNumbers* numbers) {
  ApplySpan span{};
  span.master = at(slot.master, first);
  if (slot.kind != WeightKind::kF32) {
    span.weight = static_cast<uint16_t*>(parameter.weight.data) + first;
  }
  span.grad = static_cast<char*>(parameter.grad.data) + first * size_of(parameter.grad.dtype);
  span.state[0] = at(slot.state[0], first);
  span.state[1] = at(slot.state[1], first);
  span.count = count;
  span.first_index = static_cast<uint32_t>(first);
  span.numbers = numbers;
  return span;
}

}  // namespace

void make_plan(const std::vector<Parameter>& parameters, FusedState* state) {
  state->jobs.clear();
  state->spans.clear();
  state->owners.clear();
  state->numbers.resize(parameters.size());
  state->bytes = 0;
  size_t room = 0;
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
    state->bytes += static_cast<size_t>(grad.count) * (8 * state_buffers(rule) + 10);
    for (size_t first = 0; first < static_cast<size_t>(grad.count);) {
      if (!fits()) {
        const size_t begin = state->spans.size();
        state->jobs.push_back({rule, grad.dtype, slot.kind, begin, begin});
        room = kJobElements;
      }
      const size_t block = kJobElements - first % kJobElements;
      const size_t count = std::min({static_cast<size_t>(grad.count) - first, room, block});
      state->spans.push_back(make_span(parameters[i], slot, first, count, &state->numbers[i]));
      state->owners.push_back(i);
      state->jobs.back().end = state->spans.size();
      first += count;
      room -= count;
    }
  }
  state->planned = true;
}

}  // namespace headroom::internal
