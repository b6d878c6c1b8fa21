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
[[noreturn]] void no_cuda() {
  throw Error(ErrorCode::kUnsupported, "This build of Headroom does not support CUDA.");
}

}  // namespace

bool built_with_cuda() { return false; }
bool cuda_loaded() { return false; }
MemoryPlace memory_place(const TensorView&) { return {}; }
bool reads_pageable_memory(int) { return false; }

CudaBuffer::CudaBuffer(int, size_t) { no_cuda(); }
void CudaFree::operator()(void*) const {}
CudaHostBuffer::CudaHostBuffer(size_t) { no_cuda(); }
void CudaFreeHost::operator()(void*) const {}
void cuda_upload(void*, const void*, size_t) { no_cuda(); }
void cuda_wait(int) { no_cuda(); }
int cuda_code_version(int) { no_cuda(); }
void cuda_settle(int) { no_cuda(); }
void cuda_refuse_capture(int) { no_cuda(); }
void cuda_copy(int, void*, const void*, size_t) { no_cuda(); }
void cuda_zero(int, void*, size_t) { no_cuda(); }
void cuda_convert(const TensorView&, const TensorView&) { no_cuda(); }
GradStats cuda_measure(const std::vector<TensorView>&, const MeasureJob&, GradDetail*) {
  no_cuda();
}

CudaMeasure::CudaMeasure(int) { no_cuda(); }
void CudaMeasure::set_list(const std::vector<TensorView>&) { no_cuda(); }
void CudaMeasure::enqueue(const MeasureJob&) { no_cuda(); }
void CudaMeasure::enqueue_clear(const bool*) { no_cuda(); }

struct CudaRanges::Event {};
CudaRanges::CudaRanges(int, size_t) : host_(0) { no_cuda(); }
CudaRanges::~CudaRanges() = default;
void CudaRanges::clear(size_t) { no_cuda(); }
void CudaRanges::measure(const std::vector<TensorView>&, size_t) { no_cuda(); }
void CudaRanges::copy_to_host(size_t) { no_cuda(); }
bool CudaRanges::ready() const { no_cuda(); }
void CudaRanges::wait() const { no_cuda(); }
RangeStats CudaRanges::read(size_t, int64_t) const { no_cuda(); }

// NOLINTNEXTLINE(performance-unnecessary-value-param): the CUDA version moves from it
void CudaApply::set_slots(int, std::vector<CudaSlot>, size_t, uint64_t) { no_cuda(); }
void CudaApply::set_groups(const std::vector<RuleSettings>&) { no_cuda(); }
void CudaApply::set_steps(const std::vector<int64_t>&) { no_cuda(); }
std::vector<int64_t> CudaApply::wait_steps(size_t) const { no_cuda(); }
void CudaApply::prepare(float) { no_cuda(); }
void CudaApply::step(const ApplyJob&, bool) { no_cuda(); }
void cuda_follow(const TensorView&, float*, bool) { no_cuda(); }

template <typename T>
uint64_t CudaMailbox<T>::latest() const {
  no_cuda();
}
template <typename T>
std::optional<T> CudaMailbox<T>::read() const {
  no_cuda();
}
template class CudaMailbox<CudaReport>;
template class CudaMailbox<CudaAlarm>;
template class CudaMailbox<CudaDifference>;

CudaOptimizer::CudaOptimizer(int device) : measure_(device) {}
void CudaOptimizer::set_lists(const std::vector<TensorView>&, const std::vector<TensorView>&) {
  no_cuda();
}
void CudaOptimizer::measure_gradients(const MeasureJob&) { no_cuda(); }
void CudaOptimizer::clear(const bool*) { no_cuda(); }
CudaScaler::CudaScaler(int) { no_cuda(); }
void CudaScaler::set_record(const ScaleRecord&, float) { no_cuda(); }
ScaleNumbers CudaScaler::wait_numbers() const { no_cuda(); }
void CudaScaler::scale(const TensorView&, const TensorView&) { no_cuda(); }
StepSeen CudaScaler::wait_seen() const { no_cuda(); }
void CudaScaler::count_overflow() { no_cuda(); }
float* CudaScaler::scale_address() const { no_cuda(); }
void CudaScaler::unscale(const CudaRanks&, CudaOptimizer*) { no_cuda(); }
void CudaScaler::decide(const CudaStep&, const CudaTables&, const CudaRanks&, CudaOptimizer*) {
  no_cuda();
}
void CudaScaler::update() { no_cuda(); }
void CudaScaler::rescale(bool, CudaOptimizer*) { no_cuda(); }
void cuda_scale(const TensorView&, float, const TensorView&) { no_cuda(); }

}  // namespace internal
}  // namespace headroom
