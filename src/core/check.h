// core/ holds what every other station stands on: formats, tensor views, errors, threads and the
// choice of SIMD target. This header has the checks that turn bad arguments into errors.
#ifndef HEADROOM_SRC_CORE_CHECK_H_
#define HEADROOM_SRC_CORE_CHECK_H_

#include <headroom/error.h>
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
std::string number(double value);

enum class Access { kRead, kWrite };

/// Why the view cannot be used for `access` on this build, as the end of a sentence; empty if it
/// can: data for its count, a count >= 0, a known type, memory this build can reach.
std::string unusable(const TensorView& view, Access access);

/// Throws unless the view can be used. `name` is called only then, for the start of the sentence.
template <typename Name>
void check_view(const TensorView& view, Access access, const Name& name) {
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

/// True if the two views share at least one byte.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CHECK_H_
