// Divides an optimizer's parameters on the CPU into spans for the kernels and jobs for the threads.
#include <algorithm>

#include "apply/formats.h"
#include "apply/fused.h"

namespace headroom::internal {
namespace {

// Elements of one job. It divides 2^32, so that all elements of a span have the same upper 32 bits
// of their index and thus the same random key. Spans begin at whole groups of compact moments.
constexpr size_t kJobElements = size_t{1} << 14;
constexpr size_t kGroup = kGroupSize;
static_assert(kJobElements % kGroup == 0);

template <typename T>
T* at(T* base, size_t bytes) {
  return base == nullptr ? nullptr
                         : static_cast<T*>(static_cast<void*>(
                               static_cast<char*>(static_cast<void*>(base)) + bytes));
}

StateArrays arrays_at(const Slot& slot, size_t first) {
  const bool wide = slot.kind == WeightKind::kF32;
  const size_t moment = first * state_bytes(slot.format);
  const StateArrays& all = slot.arrays;
  return {
      .master = at(all.master, first * (wide ? 4 : state_bytes(slot.format))),
      .moments = {at(all.moments[0], moment), at(all.moments[1], moment)},
      .exponents = {at(all.exponents[0], first / kGroup), at(all.exponents[1], first / kGroup)}};
}

ApplySpan make_span(const Parameter& parameter, const Slot& slot, size_t first, size_t count,
                    const RuleNumbers* numbers, const uint8_t* follow) {
  auto* const weight = static_cast<uint16_t*>(parameter.weight.data);
  return {.state = arrays_at(slot, first),
          .weight = slot.kind == WeightKind::kF32 ? nullptr : weight + first,
          .grad = static_cast<char*>(parameter.grad.data) + first * size_of(parameter.grad.dtype),
          .grad_type = parameter.grad.dtype,
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
  state->follow.assign(parameters.size(), 1);  // find_written() changes those that it samples
  state->bytes = 0;
  size_t room = 0;  // elements that still fit into the last job
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Slot& slot = state->slots[i];
    const TensorView& grad = parameters[i].grad;
    if (grad.device.type == DeviceType::kCUDA) continue;
    const Rule rule = state->groups[slot.group].rule;
    const KernelKind kind = kernel_kind(slot, rule, grad.dtype);
    const auto fits = [&] {
      return room > 0 && !state->jobs.empty() && state->jobs.back().kind == kind;
    };
    if (has_separate_master(slot)) plan_samples(i, grad.count, state);
    // State buffers and master are read and written, the gradient is read: an estimate.
    state->bytes +=
        static_cast<size_t>(grad.count) * (2 * state_bytes(slot.format) * state_buffers(rule) + 10);
    for (size_t first = 0; first < static_cast<size_t>(grad.count);) {
      if (!fits()) {
        const size_t begin = state->spans.size();
        state->jobs.push_back({kind, begin, begin});
        room = kJobElements;
      }
      const size_t block = kJobElements - first % kJobElements;
      const size_t count = std::min({static_cast<size_t>(grad.count) - first, room, block});
      state->spans.push_back(
          make_span(parameters[i], slot, first, count, &state->numbers[i], &state->follow[i]));
      state->owners.push_back(i);
      state->jobs.back().end = state->spans.size();
      first += count;
      room -= std::min(room, (count + kGroup - 1) / kGroup * kGroup);
    }
  }
  state->planned = true;
}

}  // namespace headroom::internal
