#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/convert.cc"
#include <headroom/tensor.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/convert-inl.h"
#include "core/cuda.h"
#include "core/parallel.h"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace internal {
namespace HWY_NAMESPACE {

template <typename From, typename To>
void convert_array(const void* from, void* to, size_t count) {
  const auto* in = static_cast<const From*>(from);
  auto* out = static_cast<To*>(to);
  size_t i = 0;
  const auto advance = [&](auto d) HWY_ATTR {
    constexpr size_t kLanes = hn::MaxLanes(decltype(d)());
    for (; i + kLanes <= count; i += kLanes) store_float(d, load_float(d, in + i), out + i);
  };
  advance(DF());
  if (i == count) return;
  From in_tail[kFloatLanes] = {};
  To out_tail[kFloatLanes];
  std::memcpy(static_cast<void*>(in_tail), in + i, (count - i) * sizeof(From));
  store_float(DF(), load_float(DF(), in_tail), out_tail);
  std::memcpy(static_cast<void*>(out + i), out_tail, (count - i) * sizeof(To));
}

void convert_any(DType from_type, const void* from, DType to_type, void* to, size_t count) {
  using Function = void (*)(const void*, void*, size_t);
  static constexpr Function kByType[3][3] = {
      // the same type twice is a plain copy
      {nullptr, &convert_array<f16, bf16>, &convert_array<f16, float>},
      {&convert_array<bf16, f16>, nullptr, &convert_array<bf16, float>},
      {&convert_array<float, f16>, &convert_array<float, bf16>, nullptr}};
  kByType[static_cast<size_t>(from_type)][static_cast<size_t>(to_type)](from, to, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace internal
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {

namespace internal {
namespace {

HWY_EXPORT(convert_any);

auto convert_function() { return &HEADROOM_DISPATCH(convert_any); }

}  // namespace
}  // namespace internal

void convert(const TensorView& from, const TensorView& to) {
  using internal::require;
  internal::check_view(from, internal::Access::kRead, [] { return std::string("The source"); });
  internal::check_view(to, internal::Access::kWrite, [] { return std::string("The target"); });
  require(from.count == to.count, ErrorCode::kMismatch, [&] {
    return "convert() got a source of " + std::to_string(from.count) +
           " elements and a target of " + std::to_string(to.count) + "; they have to be equal.";
  });
  require(from.dtype != DType::kF64 && to.dtype != DType::kF64, ErrorCode::kUnsupported,
          [] { return std::string("convert() takes f16, bf16 and f32; f64 is only measured."); });
  require(!internal::overlap(from, to), ErrorCode::kInvalidArgument, [] {
    return std::string(
        "convert() got a source and a target that share memory; use another target.");
  });
  if (to.device.type == DeviceType::kCUDA || from.device.type == DeviceType::kCUDA) {
    require(from.device.type == to.device.type && from.device.index == to.device.index,
            ErrorCode::kMismatch, [] {
              return std::string("convert() got a source and a target on different devices.");
            });
    internal::cuda_convert(from, to);
    return;
  }
  if (from.dtype == to.dtype) {
    if (from.count > 0) std::memcpy(to.data, from.data, from.bytes());
    return;
  }
  constexpr size_t kPiece = size_t{1} << 16;
  const auto count = static_cast<size_t>(from.count);
  const auto function = internal::convert_function();
  internal::parallel_for((count + kPiece - 1) / kPiece, from.bytes() + to.bytes(), [&](size_t i) {
    const size_t first = i * kPiece;
    function(from.dtype, static_cast<const char*>(from.data) + first * size_of(from.dtype),
             to.dtype, static_cast<char*>(to.data) + first * size_of(to.dtype),
             std::min(kPiece, count - first));
  });
}

}  // namespace headroom
#endif
