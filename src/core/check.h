// core/ is the base of every other module: 16-bit formats, tensor views, errors, threads, SIMD
// dispatch, CUDA memory and streams. It must not know about gradients, optimizers or policies.
//
// This header has the checks that turn bad arguments into errors. Functions in core/ that are
// marked HEADROOM_API are exported for libheadroom-tools, which always has the same version. They
// are not installed and not part of the public API.
#ifndef HEADROOM_SRC_CORE_CHECK_H_
#define HEADROOM_SRC_CORE_CHECK_H_

#include <headroom/error.h>
#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/cuda.h"

namespace headroom::internal {

/// `text`, or its result if it is a function. A sentence that has to be assembled is passed as a
/// function, so that it is only built when something is wrong.
template <typename Text>
std::string text_of(const Text& text) {
  if constexpr (std::is_invocable_v<const Text&>) {
    return text();
  } else {
    return text;
  }
}

/// Throws Error(code, sentence) unless `ok`.
template <typename Text>
void require(bool ok, ErrorCode code, const Text& sentence) {
  if (!ok) [[unlikely]]
    throw Error(code, text_of(sentence));
}

/// No memory holds more elements. A larger count comes from damaged data.
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max() / 16;

/// Shortest text that reads back as the same number: "65536", "0.1", "nan".
HEADROOM_API std::string number(double value);

/// Six significant digits, for reports.
std::string short_number(double value);

/// Throws Error(kInvalidArgument) unless `ok`: "`name` is `value`; it has to be `allowed`."
template <typename Text>
void check_value(bool ok, const Text& name, double value, const char* allowed) {
  require(ok, ErrorCode::kInvalidArgument,
          [&] { return name + (" is " + number(value)) + "; it has to be " + allowed + "."; });
}

enum class Access { kRead, kWrite };

/// What makes a view unusable.
enum class Flaw : uint8_t { kNone, kType, kNegative, kTooMany, kNull, kDevice, kNoCuda, kConst };

/// Checks type, count, data, device and read_only of a view for `access` in this build. Inline,
/// because in a list of small tensors it would take as long as the kernel.
inline Flaw flaw_of(const TensorView& view, Access access) {
  if (size_of(view.dtype) == 0) return Flaw::kType;
  if (view.count < 0) return Flaw::kNegative;
  if (view.count > kMaxCount) return Flaw::kTooMany;
  if (view.data == nullptr && view.count > 0) return Flaw::kNull;
  if (view.device.type != DeviceType::kCPU) {
    if (view.device.type != DeviceType::kCUDA) return Flaw::kDevice;
    if (!built_with_cuda()) return Flaw::kNoCuda;
  }
  return view.read_only && access == Access::kWrite ? Flaw::kConst : Flaw::kNone;
}

/// The flaw as the end of a sentence, or an empty text.
HEADROOM_API std::string unusable(const TensorView& view, Access access);

/// Checks that the view's memory can be used on the device that the view names. Returns the problem
/// as the end of a sentence; an empty text if there is none, or if CUDA has no information. Without
/// this check a device pointer in a CPU view is a segmentation fault, and a host pointer in a CUDA
/// view corrupts the CUDA context of the process.
HEADROOM_API std::string misplaced(const TensorView& view);

/// Throws unless the view's fields can be used. `name` is the start of the sentence.
template <typename Text>
void check_form(const TensorView& view, Access access, const Text& name) {
  const Flaw flaw = flaw_of(view, access);
  require(flaw == Flaw::kNone,
          flaw == Flaw::kNoCuda ? ErrorCode::kUnsupported : ErrorCode::kInvalidArgument,
          [&] { return text_of(name) + unusable(view, access); });
}

/// Throws unless the view's memory is on the device that the view names.
template <typename Text>
void check_memory(const TensorView& view, const Text& name) {
  const std::string why = misplaced(view);
  require(why.empty(), ErrorCode::kInvalidArgument, [&] { return text_of(name) + why; });
}

/// Both checks. Views are checked once, where they enter the library; a step trusts the views that
/// are bound to an optimizer.
template <typename Text>
void check_view(const TensorView& view, Access access, const Text& name) {
  check_form(view, access, name);
  check_memory(view, name);
}

inline bool same_device(const Device& a, const Device& b) {
  return a.type == b.type && (a.type == DeviceType::kCPU || a.index == b.index);
}

/// True if the two views share at least one byte.
bool overlap(const TensorView& a, const TensorView& b);

/// Indices of two views that share memory, the smaller one first; none if all are apart.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<const TensorView*>& views);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CHECK_H_
