// Allocates masters and state buffers, with the library's own memory or a framework's allocator.
#include <algorithm>
#include <cstring>
#include <map>

#include "apply/arena.h"
#include "apply/fused.h"
#include "core/check.h"

namespace headroom::internal {
namespace {

template <typename Buffer>
std::shared_ptr<void> shared(Buffer buffer) {
  const auto owner = std::make_shared<Buffer>(std::move(buffer));
  return {owner, owner->data()};
}

// A block of zeros.
std::shared_ptr<void> new_block(const Device& device, size_t floats,
                                const StateAllocator& allocator) {
  const bool cuda = device.type == DeviceType::kCUDA;
  const size_t bytes = floats * sizeof(float);
  if (!allocator) {
    return cuda ? shared(CudaBuffer(device.index, bytes)) : shared(FloatBuffer(floats));
  }
  // In a captured graph, every replay would set masters and moments to their first values.
  if (cuda) cuda_refuse_capture(device.index);
  std::shared_ptr<void> block = allocator(bytes, device);
  require(block != nullptr && reinterpret_cast<uintptr_t>(block.get()) % 64 == 0,
          ErrorCode::kInvalidArgument,
          "The optimizer's allocator returned memory that is not aligned to 64 bytes.");
  if (cuda) {
    cuda_zero(view(block.get(), DType::kF32, static_cast<int64_t>(floats), device));
  } else {
    std::memset(block.get(), 0, bytes);
  }
  return block;
}

}  // namespace

void copy_to_master(const TensorView& weight, const Slot& slot) {
  if (has_master(slot.kind)) convert(weight, view_like(weight, slot.master));
}

void allocate_slots(const std::vector<Parameter>& parameters, FusedState* state) {
  std::vector<Slot> slots = state->slots;
  std::map<int, Arena> arenas;  // by device, -1 for the CPU
  const auto arena_of = [&](size_t i) -> Arena& {
    const Device& device = parameters[i].weight.device;
    return arenas[device.type == DeviceType::kCUDA ? device.index : -1];
  };
  const auto buffers_of = [&](const Slot& slot) {
    return state_buffers(state->groups[slot.group].rule);
  };
  // Arrays that are not null were provided by the caller.
  for (size_t i = state->allocated; i < slots.size(); ++i) {
    const Slot& slot = slots[i];
    const bool master = has_master(slot.kind) && slot.master == nullptr;
    const size_t buffers = slot.state[0] == nullptr ? buffers_of(slot) : 0;
    arena_of(i).plan(parameters[i].weight.count, master, buffers);
  }
  std::vector<std::shared_ptr<void>> memory = state->memory;
  for (auto& [index, arena] : arenas) {
    if (arena.floats() == 0) continue;
    const Device device{index < 0 ? DeviceType::kCPU : DeviceType::kCUDA, std::max(index, 0)};
    memory.push_back(new_block(device, arena.floats(), state->allocator));
    arena.place(static_cast<float*>(memory.back().get()));
  }
  for (size_t i = state->allocated; i < slots.size(); ++i) {
    const TensorView& weight = parameters[i].weight;
    Slot& slot = slots[i];
    if (has_master(slot.kind) && slot.master == nullptr) {
      slot.master = arena_of(i).take(0, weight.count);
      copy_to_master(weight, slot);
    }
    for (size_t b = 0; b < buffers_of(slot); ++b) {
      if (slot.state[b] == nullptr) slot.state[b] = arena_of(i).take(b + 1, weight.count);
    }
  }
  settle_devices({parameters.begin() + static_cast<ptrdiff_t>(state->allocated), parameters.end()});
  state->slots = std::move(slots);
  state->memory = std::move(memory);
  state->allocated = state->slots.size();
  state->invalidate_plan();
}

}  // namespace headroom::internal
