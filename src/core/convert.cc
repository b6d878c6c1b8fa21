// convert(): copies between f16, bf16 and f32. The kernel is compiled once per SIMD target.
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
  const DF d;
  size_t i = 0;
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    store_float(d, load_float(d, in + i), out + i);
  }
  if (i == count) return;
  From in_tail[kFloatLanes] = {};  // a whole vector at the end would read beyond the array
  To out_tail[kFloatLanes];
  std::memcpy(static_cast<void*>(in_tail), in + i, (count - i) * sizeof(From));
  store_float(d, load_float(d, in_tail), out_tail);
  std::memcpy(static_cast<void*>(out + i), out_tail, (count - i) * sizeof(To));
}

// `from_type` and `to_type` differ: equal types are copied with memcpy, which keeps signalling NaN.
void convert_any(DType from_type, const void* from, DType to_type, void* to, size_t count) {
  using Function = void (*)(const void*, void*, size_t);
  static constexpr Function kByType[3][3] = {
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
HWY_EXPORT(convert_any);
}

void convert(const TensorView& from, const TensorView& to) {
  using namespace internal;
  check_view(from, Access::kRead, "The source");
  check_view(to, Access::kWrite, "The target");
  require(from.count == to.count, ErrorCode::kMismatch, [&] {
    return "convert() got a source of " + std::to_string(from.count) +
           " elements and a target of " + std::to_string(to.count) + "; they have to be equal.";
  });
  require(from.dtype != DType::kF64 && to.dtype != DType::kF64, ErrorCode::kUnsupported,
          "convert() takes f16, bf16 and f32; f64 is only measured.");
  require(!overlap(from, to), ErrorCode::kInvalidArgument,
          "convert() got a source and a target that share memory; use another target.");
  require(same_device(from.device, to.device), ErrorCode::kMismatch,
          "convert() got a source and a target on different devices.");
  if (to.device.type == DeviceType::kCUDA) return cuda_convert(from, to);
  if (from.dtype == to.dtype) {
    if (from.count > 0) std::memcpy(to.data, from.data, from.bytes());
    return;
  }
  constexpr size_t kPiece = size_t{1} << 16;  // elements that one thread converts at a time
  const auto count = static_cast<size_t>(from.count);
  const auto function = &HEADROOM_DISPATCH(convert_any);
  parallel_for((count + kPiece - 1) / kPiece, from.bytes() + to.bytes(), [&](size_t i) {
    const size_t first = i * kPiece;
    function(from.dtype, static_cast<const char*>(from.data) + first * size_of(from.dtype),
             to.dtype, static_cast<char*>(to.data) + first * size_of(to.dtype),
             std::min(kPiece, count - first));
  });
}

}  // namespace headroom
#endif
