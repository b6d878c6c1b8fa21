// Replaces the .cu files and memory.cc in builds without CUDA: the same symbols, which throw.
#include <headroom/error.h>
#include <headroom/runtime.h>

#include "apply/cuda.h"
#include "core/cuda.h"
#include "measure/cuda.h"
#include "scaler/cuda.h"

namespace headroom {

bool cuda_available() { return false; }

namespace internal {
namespace {

// Rarely reached: views on CUDA devices are refused when they are checked.
[[noreturn]] void without() {
  throw Error(ErrorCode::kUnsupported, "This build of Headroom does not support CUDA.");
}

}  // namespace

bool built_with_cuda() { return false; }
MemoryPlace memory_place(const TensorView&) { return {}; }
bool reads_pageable_memory(int) { return false; }

CudaBuffer::CudaBuffer(int, size_t) { without(); }
void CudaFree::operator()(void*) const {}
CudaHostBuffer::CudaHostBuffer(size_t) { without(); }
void CudaFreeHost::operator()(void*) const {}
void cuda_upload(void*, const void*, size_t) { without(); }
void cuda_wait(int) { without(); }
void cuda_settle(int) { without(); }
void cuda_copy(int, void*, const void*, size_t) { without(); }
void cuda_zero(const TensorView&) { without(); }
void cuda_convert(const TensorView&, const TensorView&) { without(); }
GradStats cuda_measure(const std::vector<TensorView>&, const MeasureJob&, GradDetail*) {
  without();
}

CudaMeasure::CudaMeasure(int) { without(); }
void CudaMeasure::set_list(const std::vector<TensorView>&) { without(); }
void CudaMeasure::enqueue(const MeasureJob&) { without(); }
void CudaMeasure::enqueue_clear(const bool*) { without(); }

// NOLINTNEXTLINE(performance-unnecessary-value-param): the CUDA version moves from it
void CudaApply::set_slots(int, std::vector<CudaSlot>, size_t, uint64_t) { without(); }
void CudaApply::set_groups(const std::vector<RuleSettings>&) { without(); }
void CudaApply::set_steps(const std::vector<int64_t>&) { without(); }
std::vector<int64_t> CudaApply::wait_steps(size_t) const { without(); }
void CudaApply::prepare(float) { without(); }
void CudaApply::step(const ApplyJob&, bool) { without(); }
void cuda_follow(const TensorView&, float*, bool) { without(); }

template <typename T>
uint64_t CudaMailbox<T>::latest() const {
  without();
}
template <typename T>
std::optional<T> CudaMailbox<T>::read() const {
  without();
}
template class CudaMailbox<CudaReport>;
template class CudaMailbox<CudaAlarm>;
template class CudaMailbox<CudaDifference>;

CudaOptimizer::CudaOptimizer(int device) : measure(device) {}
CudaScaler::CudaScaler(int) { without(); }
void CudaScaler::set_record(const ScaleRecord&, float) { without(); }
ScaleNumbers CudaScaler::wait_numbers() const { without(); }
void CudaScaler::scale(const TensorView&, const TensorView&) { without(); }
const float* CudaScaler::scale_address() const { without(); }
void CudaScaler::unscale(const CudaRanks&, CudaOptimizer*) { without(); }
void CudaScaler::decide(const CudaStep&, const CudaTables&, const CudaRanks&, CudaOptimizer*) {
  without();
}
void CudaScaler::update() { without(); }
void CudaScaler::rescale(bool, CudaOptimizer*) { without(); }
void cuda_scale(const TensorView&, float, const TensorView&) { without(); }

}  // namespace internal
}  // namespace headroom
