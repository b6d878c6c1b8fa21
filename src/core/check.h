// core/ holds what every other station stands on: formats, tensor views, errors, threads and the
// choice of SIMD target. This header has the checks that turn bad arguments into errors.
//
// What is marked HEADROOM_API in core/ is exported for libheadroom-tools, which is always of the
// same version. It is not installed and not for users.
#ifndef HEADROOM_SRC_CORE_CHECK_H_
#define HEADROOM_SRC_CORE_CHECK_H_

#include <headroom/error.h>
#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <limits>
#include <string>

#include "core/cuda.h"

namespace headroom::internal {

/// Throws Error(code, sentence) unless `ok`. The sentence is only built when it is needed.
template <typename Sentence>
void require(bool ok, ErrorCode code, const Sentence& sentence) {
  if (!ok) [[unlikely]]
    throw Error(code, sentence());
}

/// More elements than any memory holds; beyond it a count is taken for damaged.
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max() / 16;

/// Shortest text that reads back as the same number: "65536", "0.1", "nan".
HEADROOM_API std::string number(double value);

/// Six significant digits, for reports.
std::string short_number(double value);

enum class Access { kRead, kWrite };

/// Why the view cannot be used for `access` on this build, as the end of a sentence; empty if it
/// can: data for its count, a count >= 0, a known type, memory this build can reach.
HEADROOM_API std::string unusable(const TensorView& view, Access access);

/// Why the view's memory cannot be used on the device that the view names, as the end of a
/// sentence; empty if it can, or if nobody knows. A device pointer called host memory would be a
/// segmentation fault, and a host pointer called device memory would make CUDA unusable.
HEADROOM_API std::string misplaced(const TensorView& view);

/// Throws unless the view's fields can be used. `name` is called only then, for the start of the
/// sentence.
template <typename Name>
void check_form(const TensorView& view, Access access, const Name& name) {
  const bool plain = view.data != nullptr && view.count >= 0 && view.count <= kMaxCount &&
                     view.dtype <= DType::kF64 && view.device.type == DeviceType::kCPU &&
                     !(view.read_only && access == Access::kWrite);
  if (plain) return;
  const std::string why = unusable(view, access);
  if (!why.empty()) {
    const bool elsewhere = view.device.type != DeviceType::kCPU && !built_with_cuda();
    throw Error(elsewhere ? ErrorCode::kUnsupported : ErrorCode::kInvalidArgument, name() + why);
  }
}

/// Throws unless the view's memory is where the view says.
template <typename Name>
void check_memory(const TensorView& view, const Name& name) {
  const std::string why = misplaced(view);
  if (!why.empty()) throw Error(ErrorCode::kInvalidArgument, name() + why);
}

/// Both. Views that enter the library go through this once; a step trusts those that are bound.
template <typename Name>
void check_view(const TensorView& view, Access access, const Name& name) {
  check_form(view, access, name);
  check_memory(view, name);
}

/// True if the two views share at least one byte.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CHECK_H_
