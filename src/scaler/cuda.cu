// The kernels of a scaler on a CUDA device. They call the same pack(), decide() and advance() as
// the CPU. Most have one thread: they do little work, but keep the host from waiting.
#include "scaler/cuda.h"

#include <atomic>

#include "apply/cuda.cuh"
#include "core/cuda.cuh"
#include "core/element.h"
#include "measure/stats.h"

namespace headroom::internal {
namespace {

// Writes the value, then its number. The fence between them guarantees that a host that sees the
// number also sees the whole value.
template <typename T>
__device__ void send(const T& value, uint64_t number, CudaMail<T>* mail) {
  mail->slots[number % CudaMail<T>::kSlots] = value;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&mail->latest) = number;
}

// out = loss x scale. If `from` is not null, the scale is read there.
__global__ void scale_kernel(TensorView loss, float scale, const CudaScale* from, float* out) {
  if (from != nullptr) scale = from->record.numbers.scale;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= loss.count) return;
  out[i] = scale * with_type<f16, bf16, float>(loss.dtype, [&](auto element) {
             return to_float(static_cast<const decltype(element)*>(loss.data)[i]);
           });
}

__global__ void merge_copies_kernel(const GradStats* copies, GradStats* whole) {
  merge_copies(*copies, whole);
}

// Writes the message of this rank. Adds the fields of the status that only the device has.
__global__ void pack_kernel(const GradStats* stats, int rank, RankStatus status, bool enabled,
                            CudaScale* scale, CudaAgreement* agreement) {
  const ScaleNumbers& numbers = scale->record.numbers;
  status.fields[RankStatus::kMessage] = static_cast<double>(scale->messages++);
  status.fields[RankStatus::kUpdates] = static_cast<double>(numbers.steps);
  status.fields[RankStatus::kScale] = enabled ? static_cast<double>(numbers.scale) : 1.0;
  double state = 0.0;
  visit_numbers(scale->record.policy.rule(), numbers, Fingerprint{&state});
  status.fields[RankStatus::kState] = state;
  agreement->message = pack(*stats, rank, status);
}

// Reads the combined message of all ranks.
__global__ void unpack_kernel(const GradStats* stats, bool replicated, CudaScale* scale,
                              CudaAgreement* agreement, CudaMail<CudaDifference>* mail) {
  const Message& message = agreement->message;
  agreement->stats = unpack(message, replicated, *stats);
  agreement->same_names = message.same_names();
  const int field = difference(message);
  agreement->differ = field != RankStatus::kCount;
  if (!agreement->differ) return;
  send(CudaDifference{field, message.low(field), message.high(field)},
       static_cast<uint64_t>(++scale->differences), mail);
}

// Stores the result of unscale_() for the step that follows.
__global__ void unscaled_kernel(const GradStats* stats, const CudaAgreement* agreement,
                                CudaScale* scale, CudaProgress* progress) {
  progress->unscaled = *stats;
  progress->unscaled_same_names = agreement == nullptr || agreement->same_names;
  const bool bad = !stats->ok() || (agreement != nullptr && agreement->differ);
  progress->numbers.found_inf = bad ? 1.0f : 0.0f;
  see(bad, stats->amax, &scale->seen);
}

// The verdict on one step: the same logic as Scaler::step() has for the CPU.
__device__ CudaReport report_on(const GradStats& stats, const CudaAgreement* agreement,
                                const CudaStep& step, CudaScale* scale, CudaProgress* progress) {
  CudaReport report;
  report.stats = stats;
  report.same_names = agreement == nullptr || agreement->same_names;
  report.scale = step.enabled                     ? scale->record.numbers.scale
                 : step.external.scale != nullptr ? *step.external.scale
                                                  : 1.0f;
  const bool unscaled_bad = step.unscaled && progress->numbers.found_inf != 0.0f;
  const bool bad = unscaled_bad || (agreement != nullptr && agreement->differ) ||
                   (step.external.found_inf != nullptr && *step.external.found_inf != 0.0f);
  report.verdict = decide(stats.finite() && !bad, norm_of(stats), stats.amax,
                          step.unscaled ? 1.0f : report.scale, step.limits);
  if (unscaled_bad && progress->unscaled.culprit >= 0) {
    copy_culprit(progress->unscaled, &report.stats);
    report.same_names = progress->unscaled_same_names;
  }
  const bool skip = !report.verdict.apply();
  if (step.enabled) {
    see(overflowed(report.verdict.skip), step.unscaled ? 0.0 : stats.amax, &scale->seen);
  }
  report.steps = ++progress->steps;
  report.skipped = progress->skipped += skip;
  progress->verdict = {!skip, report.verdict.multiplier};
  progress->numbers = step_numbers(report.verdict, step.unscaled ? 1.0f : report.scale);
  return report;
}

// One thread decides while the others compute the numbers of the step. Then the others publish the
// verdict and count the step while that thread sends its report to the host, which is slow. The
// deciding thread is in a warp of its own, so that it does not diverge from the others.
__global__ void decide_kernel(const GradStats* stats, const CudaAgreement* agreement, CudaStep step,
                              CudaScale* scale, CudaProgress* progress, CudaMail<CudaReport>* mail,
                              CudaTables tables) {
  __shared__ DeviceVerdict verdict;
  CudaReport report;
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (threadIdx.x == kPrepareThreads) {
    report = report_on(*stats, agreement, step, scale, progress);
    verdict = progress->verdict;
  } else if (threadIdx.x < kPrepareThreads) {
    prepare_numbers(tables);
  }
  __syncthreads();
  if (threadIdx.x == kPrepareThreads) {
    send(report, static_cast<uint64_t>(report.steps), mail);
  } else if (threadIdx.x < kPrepareThreads) {
    prepare_verdict(tables, verdict);
  }
}

// Counts a step as overflowed that the host has skipped after the verdict.
__global__ void overflow_kernel(CudaScale* scale) { scale->seen.overflow = true; }

// One update of the scale, by the input that the steps of this round have collected.
__global__ void update_kernel(CudaScale* scale, CudaMail<CudaAlarm>* mail) {
  wait_for_kernel_before();
  ScaleNumbers& numbers = scale->record.numbers;
  const float before = numbers.scale;
  const Alarm alarm = advance(scale->record.policy, scale->seen, &numbers);
  scale->seen = StepSeen{};
  scale->inverse = inverse(numbers.scale);
  scale->factor = rescale_factor(before, numbers.scale);
  if (alarm == Alarm::kNone) return;
  send(CudaAlarm{alarm, before, numbers.skips_in_row}, static_cast<uint64_t>(++scale->alarms),
       mail);
}

void launch_scale(const TensorView& loss, float scale, const CudaScale* from,
                  const TensorView& out) {
  const DeviceScope scope(out.device.index);
  const auto blocks = static_cast<unsigned>((loss.count + 255) / 256);
  if (blocks == 0) return;
  scale_kernel<<<blocks, 256, 0, current_stream()>>>(loss, scale, from,
                                                     static_cast<float*>(out.data));
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace

template <typename T>
uint64_t CudaMailbox<T>::latest() const {
  return std::atomic_ref<uint64_t>(data()->latest).load(std::memory_order_acquire);
}

// A seqlock without retries by the writer: the value is valid if the kernels cannot have begun to
// overwrite its slot while it was copied, that is, if fewer than kSlots - 1 values came since.
template <typename T>
std::optional<T> CudaMailbox<T>::read() const {
  constexpr uint64_t kSlots = CudaMail<T>::kSlots;
  for (uint64_t number = latest(); number > 0; number = latest()) {
    const T value = data()->slots[number % kSlots];
    std::atomic_thread_fence(std::memory_order_acquire);
    if (latest() + 1 < number + kSlots) return value;
  }
  return std::nullopt;
}

template class CudaMailbox<CudaReport>;
template class CudaMailbox<CudaAlarm>;
template class CudaMailbox<CudaDifference>;

CudaOptimizer::CudaOptimizer(int device) : measure_(device) { progress_.reserve(device, 1); }

void CudaOptimizer::set_lists(const std::vector<TensorView>& grads,
                              const std::vector<TensorView>& copies) {
  measure_.set_list(grads);
  if (!copies.empty() && !copies_.has_value()) copies_.emplace(measure_.device());
  if (copies_.has_value()) copies_->set_list(copies);
}

void CudaOptimizer::measure_gradients(const MeasureJob& job) {
  measure_.enqueue(job);
  if (!copies_.has_value()) return;
  const DeviceScope scope(measure_.device());
  copies_->enqueue(job);
  merge_copies_kernel<<<1, 1, 0, current_stream()>>>(copies_->stats(), measure_.stats());
  HEADROOM_CUDA(cudaGetLastError());
}

void CudaOptimizer::clear(const bool* keep) {
  measure_.enqueue_clear(keep);
  if (copies_.has_value()) copies_->enqueue_clear(keep);
}

CudaScaler::CudaScaler(int device) : device_(device) { scale_.reserve(device, 1); }

void CudaScaler::set_record(const ScaleRecord& record, float factor) {
  const DeviceScope scope(device_);
  // cuda_upload() writes words of 8 bytes: none may cover a field that is not uploaded.
  static_assert(offsetof(CudaScale, record) == 0 && sizeof(ScaleRecord) % 8 == 0);
  static_assert(offsetof(CudaScale, factor) == offsetof(CudaScale, inverse) + sizeof(float));
  cuda_upload(&scale_.data()->record, &record, sizeof(record));
  const float both[2] = {inverse(record.numbers.scale), factor};
  cuda_upload(&scale_.data()->inverse, both, sizeof(both));
  cuda_wait(device_);  // the next call may use another stream
}

ScaleNumbers CudaScaler::wait_numbers() const {
  ScaleNumbers numbers;
  cuda_copy(device_, &numbers, &scale_.data()->record.numbers, sizeof(numbers));
  return numbers;
}

StepSeen CudaScaler::wait_seen() const {
  StepSeen seen;
  cuda_copy(device_, &seen, &scale_.data()->seen, sizeof(seen));
  return seen;
}

void CudaScaler::scale(const TensorView& loss, const TensorView& out) {
  launch_scale(loss, 0.0f, scale_.data(), out);
}

float* CudaScaler::scale_address() const { return &scale_.data()->record.numbers.scale; }

// Enqueues the exchange with the other ranks, if there are any.
void CudaScaler::agree(bool enabled, const CudaRanks& ranks, CudaOptimizer* optimizer) {
  if (ranks.ranks == nullptr) return;
  const cudaStream_t stream = current_stream();
  const GradStats* const stats = optimizer->measured();
  optimizer->agreement.reserve(device_, 1);
  CudaAgreement* const agreement = optimizer->agreement.data();
  pack_kernel<<<1, 1, 0, stream>>>(stats, ranks.ranks->rank(), ranks.status, enabled, scale_.data(),
                                   agreement);
  HEADROOM_CUDA(cudaGetLastError());
  ranks.ranks->enqueue(agreement->message.sums, Message::kSums, agreement->message.maxima,
                       Message::kMaxima, stream);
  unpack_kernel<<<1, 1, 0, stream>>>(stats, ranks.status.replicated(), scale_.data(), agreement,
                                     differences.data());
  HEADROOM_CUDA(cudaGetLastError());
}

void CudaScaler::unscale(const CudaRanks& ranks, CudaOptimizer* optimizer) {
  const DeviceScope scope(device_);
  optimizer->measure_gradients({.unscale = true, .device_factor = &scale_.data()->inverse});
  agree(true, ranks, optimizer);
  unscaled_kernel<<<1, 1, 0, current_stream()>>>(optimizer->found(), optimizer->agreement.data(),
                                                 scale_.data(), optimizer->progress());
  HEADROOM_CUDA(cudaGetLastError());
}

// kPrepareThreads threads prepare the step; one more warp has the thread that decides.
void CudaScaler::decide(const CudaStep& step, const CudaTables& tables, const CudaRanks& ranks,
                        CudaOptimizer* optimizer) {
  const DeviceScope scope(device_);
  agree(step.enabled, ranks, optimizer);
  launch_early(decide_kernel, 1, kPrepareThreads + 32, optimizer->found(),
               optimizer->agreement.data(), step, scale_.data(), optimizer->progress(),
               optimizer->reports.data(), tables);
}

void CudaScaler::count_overflow() {
  const DeviceScope scope(device_);
  overflow_kernel<<<1, 1, 0, current_stream()>>>(scale_.data());
  HEADROOM_CUDA(cudaGetLastError());
}

void CudaScaler::update() {
  const DeviceScope scope(device_);
  launch_early(update_kernel, 1, 1, scale_.data(), alarms.data());
}

void CudaScaler::rescale(bool unscaled, CudaOptimizer* optimizer) {
  const DeviceScope scope(device_);
  const CudaScale* const scale = scale_.data();
  optimizer->measure_gradients(
      {.unscale = true,
       .device_factor = unscaled ? &scale->record.numbers.scale : &scale->factor,
       .skip_at_one = true});
}

void cuda_scale(const TensorView& loss, float scale, const TensorView& out) {
  launch_scale(loss, scale, nullptr, out);
}

}  // namespace headroom::internal
