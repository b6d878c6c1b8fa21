// Names, checks and locations of tensor views.
#include <headroom/tensor.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "core/cuda.h"

namespace headroom {

const char* to_string(DType dtype) {
  static constexpr const char* kNames[] = {"f16", "bf16", "f32", "f64"};
  return dtype <= DType::kF64 ? kNames[static_cast<size_t>(dtype)] : "unknown";
}

TensorView device_view(void* data, DType dtype, int64_t count) {
  TensorView found = view(data, dtype, count, {DeviceType::kCUDA, 0});
  if (data == nullptr || count == 0) return found;
  using internal::MemoryKind;
  const internal::MemoryPlace place = internal::memory_place(found);
  internal::require(
      place.kind != MemoryKind::kUnknown && place.kind != MemoryKind::kPageable,
      ErrorCode::kInvalidArgument,
      "device_view() got a pointer to memory that CUDA has not allocated; use view() for host "
      "memory.");
  found.device.index = place.device;
  return found;
}

namespace internal {

std::string number(double value) {
  char text[32];  // the longest double, -2.2250738585072014e-308, has 24 characters
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

std::string short_number(double value) {
  char text[32];
  constexpr auto kFormat = std::chars_format::general;
  return {text, std::to_chars(text, text + sizeof(text), value, kFormat, 6).ptr};
}

std::string unusable(const TensorView& view, Access access) {
  const std::string count = std::to_string(view.count);
  switch (flaw_of(view, access)) {
    case Flaw::kNone:
      break;
    case Flaw::kType:
      return " has an unknown element type; use kF16, kBF16, kF32 or kF64.";
    case Flaw::kNegative:
      return " has a negative count of " + count + "; pass the number of elements.";
    case Flaw::kTooMany:
      return " claims " + count + " elements, more than any memory holds; check the count.";
    case Flaw::kNull:
      return " has null data but a count of " + count + "; pass its memory, or a count of 0.";
    case Flaw::kDevice:
      return " is on a device of an unknown type; use kCPU or kCUDA.";
    case Flaw::kNoCuda:
      return " is on a CUDA device, but this build of Headroom supports the CPU only; copy it to "
             "host memory.";
    case Flaw::kConst:
      return " is a view of const data but has to be written; make the view from a non-const "
             "pointer.";
  }
  return "";
}

std::string misplaced(const TensorView& view) {
  if (view.count == 0) return "";
  // Pinned and managed memory can be used from both sides and is accepted as either.
  const MemoryPlace place = memory_place(view);
  const bool cuda = view.device.type == DeviceType::kCUDA;
  const int device = view.device.index;
  const auto name_of = [](int index) { return "CUDA device " + std::to_string(index); };
  if (place.kind == MemoryKind::kDevice && (!cuda || place.device != device)) {
    return " is memory of " + name_of(place.device) + ", but its view says " +
           (cuda ? name_of(device) : "CPU") + "; make the view with the device of its memory.";
  }
  if (place.kind == MemoryKind::kPageable && cuda && !reads_pageable_memory(device)) {
    return " is host memory that " + name_of(device) +
           " cannot reach, but its view names that device; copy it to the device, pin it, or make "
           "the view for the CPU.";
  }
  return "";
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (a.count == 0 || b.count == 0) return false;
  const auto a0 = reinterpret_cast<uintptr_t>(a.data);
  const auto b0 = reinterpret_cast<uintptr_t>(b.data);
  return a0 < b0 + b.bytes() && b0 < a0 + a.bytes();
}

// Sorts by address, after which only neighbours can overlap first: n log n instead of n^2.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<const TensorView*>& views) {
  std::vector<size_t> order;
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i]->count > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(views[a]->data, a) < std::pair(views[b]->data, b);
  });
  for (size_t i = 1; i < order.size(); ++i) {
    if (overlap(*views[order[i - 1]], *views[order[i]])) return std::minmax(order[i - 1], order[i]);
  }
  return std::nullopt;
}

}  // namespace internal
}  // namespace headroom
