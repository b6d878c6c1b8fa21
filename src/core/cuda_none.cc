// In place of the .cu files in builds without CUDA.
#include <headroom/error.h>
#include <headroom/runtime.h>

#include "apply/cuda.h"
#include "core/cuda.h"
#include "measure/cuda.h"

namespace headroom {

StreamScope::StreamScope(void*) : before_(nullptr) {}
StreamScope::~StreamScope() = default;

bool cuda_available() { return false; }

namespace internal {
namespace {

// Views on CUDA devices are refused before they come here.
[[noreturn]] void without() {
  throw Error(ErrorCode::kUnsupported, "This build of Headroom was made without CUDA.");
}

}  // namespace

bool built_with_cuda() { return false; }

CudaBuffer::CudaBuffer(int, size_t) { without(); }
void CudaFree::operator()(void*) const {}
void cuda_copy(void*, const void*, size_t) { without(); }
void cuda_zero(const TensorView&) { without(); }
void cuda_convert(const TensorView&, const TensorView&) { without(); }
Partial cuda_measure(const std::vector<TensorView>&, const MeasureJob&) { without(); }
void CudaApply::apply(int, std::vector<CudaSlot>*, const ApplyJob&) { without(); }

}  // namespace internal
}  // namespace headroom
