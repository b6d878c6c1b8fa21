#include <headroom/tensor.h>

#include <charconv>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "core/cuda.h"

namespace headroom {

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kF32:
      return "f32";
    case DType::kF64:
      return "f64";
  }
  return "unknown";
}

TensorView device_view(void* data, DType dtype, int64_t count) {
  TensorView found = view(data, dtype, count, {DeviceType::kCUDA, 0});
  if (data == nullptr || count == 0) return found;
  const internal::MemoryPlace place = internal::memory_place(found);
  const bool known =
      place.kind != internal::MemoryKind::kUnknown && place.kind != internal::MemoryKind::kPageable;
  if (!known) {
    throw Error(ErrorCode::kInvalidArgument,
                "device_view() got a pointer to memory that CUDA has not allocated; use view() for "
                "host memory.");
  }
  found.device.index = place.device;
  return found;
}

namespace internal {

std::string number(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  return std::string(text, end);
}

std::string short_number(double value) {
  char text[32];
  const auto end =
      std::to_chars(text, text + sizeof(text), value, std::chars_format::general, 6).ptr;
  return std::string(text, end);
}

std::string unusable(const TensorView& view, Access access) {
  if (size_of(view.dtype) == 0) {
    return " has an unknown element type; use kF16, kBF16, kF32 or kF64.";
  }
  if (view.count < 0) {
    return " has a negative count of " + std::to_string(view.count) +
           "; pass the number of elements.";
  }
  if (view.count > kMaxCount) {
    return " claims " + std::to_string(view.count) +
           " elements, more than any memory holds; check the count.";
  }
  if (view.data == nullptr && view.count > 0) {
    return " has null data but a count of " + std::to_string(view.count) +
           "; pass its memory, or a count of 0.";
  }
  if (view.device.type != DeviceType::kCPU && !built_with_cuda()) {
    return " lives on a CUDA device, and this build of Headroom works on the CPU only; copy it to "
           "host memory.";
  }
  if (view.read_only && access == Access::kWrite) {
    return " is a view of const data but has to be written; make the view from a non-const "
           "pointer.";
  }
  return "";
}

std::string misplaced(const TensorView& view) {
  if (view.count == 0) return "";
  const MemoryPlace place = memory_place(view);
  const bool cuda = view.device.type == DeviceType::kCUDA;
  const int device = view.device.index;
  const auto called = [](int index) { return "CUDA device " + std::to_string(index); };
  if (place.kind == MemoryKind::kDevice && (!cuda || place.device != device)) {
    return " is memory of " + called(place.device) + ", but its view says " +
           (cuda ? called(device) : "CPU") + "; make the view with the device of its memory.";
  }
  if (place.kind == MemoryKind::kPageable && cuda && !reads_pageable_memory(device)) {
    return " is host memory that " + called(device) +
           " cannot reach, but its view says that it is there; copy it to the device, pin it, or "
           "make the view for the CPU.";
  }
  return "";
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (a.count == 0 || b.count == 0) return false;
  const auto a0 = reinterpret_cast<uintptr_t>(a.data);
  const auto b0 = reinterpret_cast<uintptr_t>(b.data);
  return a0 < b0 + b.bytes() && b0 < a0 + a.bytes();
}

}  // namespace internal
}  // namespace headroom
