// Allocates masters and moments, with the library's own memory or a framework's allocator.
#include <algorithm>
#include <array>
#include <map>

#include "apply/arena.h"
#include "apply/formats.h"
#include "apply/fused.h"
#include "core/buffer.h"
#include "core/check.h"

namespace headroom::internal {
namespace {

template <typename Buffer>
std::shared_ptr<void> shared(Buffer buffer) {
  const auto owner = std::make_shared<Buffer>(std::move(buffer));
  return {owner, owner->data()};
}

// A block of zeros.
std::shared_ptr<void> new_block(const Device& device, size_t bytes,
                                const StateAllocator& allocator) {
  const bool cuda = device.type == DeviceType::kCUDA;
  if (!allocator) {
    return cuda ? shared(CudaBuffer(device.index, bytes)) : shared(FloatBuffer(bytes / 4));
  }
  // In a captured graph, every replay would set masters and moments to their first values.
  if (cuda) cuda_refuse_capture(device.index);
  std::shared_ptr<void> block = allocator(bytes, device);
  require(block != nullptr && reinterpret_cast<uintptr_t>(block.get()) % 64 == 0,
          ErrorCode::kInvalidArgument,
          "The optimizer's allocator returned memory that is not aligned to 64 bytes.");
  zero_memory(device, block.get(), bytes);
  return block;
}

// The sizes in bytes of the arrays of a slot that do not exist yet, in the order of Arena::Array.
std::array<size_t, Arena::kArrays> missing(const Slot& slot, Rule rule, int64_t count) {
  std::array<size_t, Arena::kArrays> bytes{};
  const auto elements = static_cast<size_t>(count);
  const auto groups = static_cast<size_t>((count + kGroupSize - 1) / kGroupSize);
  if (has_master(slot.kind) && slot.arrays.master == nullptr) {
    bytes[Arena::kMaster] = elements * state_bytes(slot.format);
  }
  for (size_t b = 0; b < state_buffers(rule); ++b) {
    if (slot.arrays.moments[b] != nullptr) continue;
    bytes[Arena::kMoment + b] = elements * state_bytes(slot.format);
    if (slot.format == StateFormat::kByte) bytes[Arena::kExponents + b] = groups;
  }
  return bytes;
}

// Gives a slot its missing arrays, and its master the values of the weight.
void take_arrays(const TensorView& weight, Rule rule, Arena* arena, Slot* slot) {
  const auto bytes = missing(*slot, rule, weight.count);
  StateArrays& arrays = slot->arrays;
  const bool new_master = bytes[Arena::kMaster] > 0;
  if (new_master) arrays.master = arena->take(Arena::kMaster, bytes[Arena::kMaster]);
  for (size_t b = 0; b < 2; ++b) {
    if (bytes[Arena::kMoment + b] == 0) continue;
    arrays.moments[b] = arena->take(Arena::kMoment + b, bytes[Arena::kMoment + b]);
    void* const exponents = arena->take(Arena::kExponents + b, bytes[Arena::kExponents + b]);
    arrays.exponents[b] = static_cast<uint8_t*>(exponents);
  }
  if (new_master && slot->format == StateFormat::kFull) copy_to_master(weight, *slot);
}

}  // namespace

void copy_to_master(const TensorView& weight, const Slot& slot) {
  if (!has_master(slot.kind) || weight.count == 0) return;
  if (slot.format == StateFormat::kFull) {
    convert(weight, view_like(weight, static_cast<float*>(slot.arrays.master)));
    return;
  }
  // The weight is the master if nothing is below it.
  const size_t bytes = static_cast<size_t>(weight.count) * state_bytes(slot.format);
  zero_memory(weight.device, slot.arrays.master, bytes);
}

void allocate_slots(const std::vector<Parameter>& parameters, FusedState* state) {
  std::vector<Slot> slots = state->slots;
  std::map<int, Arena> arenas;  // by device, -1 for the CPU
  const auto arena_of = [&](size_t i) -> Arena& {
    const Device& device = parameters[i].weight.device;
    return arenas[device.type == DeviceType::kCUDA ? device.index : -1];
  };
  const auto rule_of = [&](const Slot& slot) { return state->groups[slot.group].rule; };
  // Arrays that are not null were provided by the caller.
  for (size_t i = state->allocated; i < slots.size(); ++i) {
    const auto bytes = missing(slots[i], rule_of(slots[i]), parameters[i].weight.count);
    for (size_t array = 0; array < bytes.size(); ++array) arena_of(i).plan(array, bytes[array]);
  }
  std::vector<std::shared_ptr<void>> memory = state->memory;
  for (auto& [index, arena] : arenas) {
    if (arena.bytes() == 0) continue;
    const Device device{index < 0 ? DeviceType::kCPU : DeviceType::kCUDA, std::max(index, 0)};
    memory.push_back(new_block(device, arena.bytes(), state->allocator));
    arena.place(memory.back().get());
  }
  for (size_t i = state->allocated; i < slots.size(); ++i) {
    take_arrays(parameters[i].weight, rule_of(slots[i]), &arena_of(i), &slots[i]);
  }
  wait_for_devices(
      {parameters.begin() + static_cast<ptrdiff_t>(state->allocated), parameters.end()});
  state->slots = std::move(slots);
  state->memory = std::move(memory);
  state->allocated = state->slots.size();
  state->invalidate_plan();
}

}  // namespace headroom::internal
