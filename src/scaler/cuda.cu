#include "scaler/cuda.h"

#include <atomic>

#include "apply/cuda.cuh"
#include "core/cuda.cuh"
#include "scaler/members.h"

namespace headroom::internal {
namespace {

// Writes the value, then says that it is there.
template <typename T>
__device__ void tell(const T& value, uint64_t number, CudaMail<T>* mail) {
  mail->slots[number % CudaMail<T>::kSlots] = value;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&mail->latest) = number;
}

template <typename T>
__device__ float value_at(const void* data, int64_t i) {
  return to_float(static_cast<const T*>(data)[i]);
}

// The scale is at `from`, or else `scale`.
__global__ void scale_kernel(TensorView loss, float scale, CudaScale* from, float* out) {
  if (from != nullptr) {
    scale = from->state.scale;
    from->used = scale;  // the same from every thread
  }
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= loss.count) return;
  float x = 0.0f;
  if (loss.dtype == DType::kF16) x = value_at<f16>(loss.data, i);
  if (loss.dtype == DType::kBF16) x = value_at<bf16>(loss.data, i);
  if (loss.dtype == DType::kF32) x = value_at<float>(loss.data, i);
  out[i] = x * scale;
}

// The scale of the optimizer's gradients, and what a new round forgets.
__device__ void enter(const CudaScale& scale, const CudaOrder& order, CudaKnown* known) {
  if (order.first) known->scale = scale.used;
  if (order.current) known->scale = scale.state.scale;
  if (order.fresh) known->overflow = false;
  if (order.fresh) known->amax = 0.0;
}

// Adds what was found to what update() will hear of.
__device__ void see(bool overflow, const CudaKnown& known, CudaScale* scale) {
  scale->seen.overflow = scale->seen.overflow || overflow;
  // Gradients of an earlier round may have an earlier scale.
  const double amax = known.amax / static_cast<double>(known.scale);
  scale->seen.amax = fmax(scale->seen.amax, amax * static_cast<double>(scale->state.scale));
}

__global__ void enter_kernel(const CudaScale* scale, CudaOrder order, CudaKnown* known) {
  enter(*scale, order, known);
  known->inverse = inverse(known->scale);
}

__device__ Found found_of(const CudaStats& stats, int64_t count) {
  Found found;
  found.count = static_cast<double>(count);
  found.inf = static_cast<double>(stats.inf);
  found.nan = static_cast<double>(stats.nan);
  found.new_inf = static_cast<double>(stats.new_inf);
  found.new_zeros = static_cast<double>(stats.new_zeros);
  for (int i = 0; i < 3; ++i) found.squares[i] = stats.squares[i];
  found.amax = stats.amax;
  found.culprit = stats.culprit;
  found.culprit_inf = stats.culprit_inf;
  found.culprit_nan = stats.culprit_nan;
  return found;
}

// What this rank tells the others.
__global__ void pack_kernel(const CudaStats* stats, int64_t count, int rank, Stand stand,
                            CudaOrder order, CudaScale* scale, CudaKnown* known,
                            CudaAgreement* agreement) {
  if (order.enabled) enter(*scale, order, known);
  const Found mine = found_of(*stats, count);
  stand.standing.of[Standing::kMessage] = static_cast<double>(scale->messages++);
  stand.standing.of[Standing::kRound] = static_cast<double>(scale->state.steps);
  stand.standing.of[Standing::kScale] = order.enabled ? static_cast<double>(known->scale) : 1.0;
  stand.standing.of[Standing::kState] = state_fingerprint(scale->state);
  stand.standing.of[Standing::kNorm] =
      stand.gradients == RankGradients::kReplicated ? mine.sum().root() : 0.0;
  agreement->message = pack(mine, rank, stand.list, stand.standing);
}

// What all of them have found.
__global__ void unpack_kernel(const CudaStats* stats, int64_t count, bool replicated,
                              CudaScale* scale, CudaAgreement* agreement,
                              CudaMail<CudaDifference>* mail) {
  const Message& message = agreement->message;
  const Found found = unpack(message, replicated, found_of(*stats, count));
  CudaStats all;
  for (int i = 0; i < 3; ++i) all.squares[i] = found.squares[i];
  all.amax = found.amax;
  all.inf = static_cast<int64_t>(found.inf);
  all.nan = static_cast<int64_t>(found.nan);
  all.culprit = found.culprit;
  all.culprit_inf = found.culprit_inf;
  all.culprit_nan = found.culprit_nan;
  all.new_inf = static_cast<int64_t>(found.new_inf);
  all.new_zeros = static_cast<int64_t>(found.new_zeros);
  agreement->all = all;
  agreement->origin.count = static_cast<int64_t>(found.count);
  agreement->origin.culprit_rank = static_cast<int>(found.culprit_rank);
  agreement->origin.same_list = equal_on_all(message.maxima + Message::kList);
  const int which = difference(message);
  agreement->differ = which != Standing::kCount;
  if (!agreement->differ) return;
  const double* const pair = message.maxima + Message::kStanding + 2 * which;
  tell(CudaDifference{which, -pair[1], pair[0]}, static_cast<uint64_t>(++scale->differences), mail);
}

__global__ void unscaled_kernel(const CudaStats* stats, const CudaAgreement* agreement,
                                CudaScale* scale, CudaKnown* known) {
  known->found = *stats;
  known->origin = agreement != nullptr ? agreement->origin : CudaOrigin{};
  const bool differ = agreement != nullptr && agreement->differ;
  known->overflow = !stats->finite() || stats->new_inf > 0 || differ;
  known->amax = stats->amax;
  see(known->overflow, *known, scale);
}

__device__ CudaReport report_on(const CudaStats& stats, const CudaAgreement* agreement,
                                const CudaOrder& order, CudaScale* scale, CudaKnown* known) {
  CudaReport report;
  report.stats = stats;
  if (agreement != nullptr) report.origin = agreement->origin;
  report.scale = order.outside_scale != nullptr ? *order.outside_scale : 1.0f;
  if (order.enabled) {
    enter(*scale, order, known);
    report.scale = known->scale;
  }
  const double norm = stats.nan > 0 ? nan("") : stats.inf > 0 ? HUGE_VAL : stats.sum().root();
  report.verdict = decide(stats.finite(), norm, stats.amax, order.unscaled ? 1.0f : report.scale,
                          order.max_norm);
  if (agreement != nullptr && agreement->differ) report.verdict.skip = Skip::kNotFinite;
  if (order.enabled && known->overflow) {
    report.verdict.skip = Skip::kNotFinite;
    if (known->found.culprit >= 0) {
      report.stats.culprit = known->found.culprit;
      report.stats.culprit_inf = known->found.culprit_inf;
      report.stats.culprit_nan = known->found.culprit_nan;
      report.origin.culprit_rank = known->origin.culprit_rank;
      report.origin.same_list = known->origin.same_list;
    }
  }
  if (order.outside_found != nullptr && *order.outside_found != 0.0f) {
    report.verdict.skip = Skip::kNotFinite;
  }
  const bool bad = !report.verdict.apply();
  if (order.tell_skipped != nullptr) *order.tell_skipped = bad ? 1.0f : 0.0f;
  if (order.enabled && !order.unscaled) known->amax = stats.amax;
  if (order.enabled) see(bad, *known, scale);
  report.steps = ++known->steps;
  report.skipped = known->skipped += bad;
  return report;
}

// One thread decides while the others make the numbers of the step; then they count it while that
// one tells the host.
__global__ void decide_kernel(const CudaStats* stats, const CudaAgreement* agreement,
                              CudaOrder order, CudaScale* scale, CudaKnown* known,
                              CudaMail<CudaReport>* mail, CudaTables tables) {
  __shared__ CudaGo go;
  CudaReport report;
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (threadIdx.x == kPrepareThreads) {
    report = report_on(*stats, agreement, order, scale, known);
    go = {report.verdict.apply(), report.verdict.multiplier};
  } else if (threadIdx.x < kPrepareThreads) {
    prepare_numbers(tables);
  }
  __syncthreads();
  if (threadIdx.x == kPrepareThreads) {
    tell(report, static_cast<uint64_t>(report.steps), mail);
  } else if (threadIdx.x < kPrepareThreads) {
    prepare_go(tables, go);
  }
}

__global__ void update_kernel(CudaScale* scale, CudaMail<CudaAlarm>* mail) {
  wait_for_kernel_before();
  const float before = scale->state.scale;
  const Transition next = next_state(scale->policy, scale->state, scale->seen);
  scale->state = next.state;
  scale->seen = StepSeen{};
  const double ratio = static_cast<double>(next.state.scale) / static_cast<double>(before);
  scale->factor = static_cast<float>(
      fmin(fmax(ratio, static_cast<double>(kSmallestScale)), static_cast<double>(kLargestScale)));
  if (next.alarm == Alarm::kNone) return;
  const CudaAlarm alarm{next.alarm, before, next.state.skips_in_row};
  tell(alarm, static_cast<uint64_t>(++scale->alarms), mail);
}

__global__ void rescaled_kernel(const CudaScale* scale, CudaKnown* known) {
  known->scale = scale->state.scale;
}

void launch_scale(const TensorView& loss, float scale, CudaScale* from, const TensorView& out) {
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

template <typename T>
std::optional<T> CudaMailbox<T>::read() const {
  constexpr uint64_t kSlots = CudaMail<T>::kSlots;
  for (uint64_t number = latest(); number > 0; number = latest()) {
    const T value = data()->slots[number % kSlots];
    std::atomic_thread_fence(std::memory_order_acquire);
    if (latest() + 1 < number + kSlots) return value;  // nobody has begun to write over it
  }
  return std::nullopt;
}

template class CudaMailbox<CudaReport>;
template class CudaMailbox<CudaAlarm>;
template class CudaMailbox<CudaDifference>;

CudaOptimizer::CudaOptimizer(int device) : measure(device) { known_.reserve(device, 1); }

void CudaOptimizer::set_scale(float scale) {
  static_assert(offsetof(CudaKnown, scale) == 0 && offsetof(CudaKnown, inverse) == sizeof(float));
  const float both[2] = {scale, inverse(scale)};
  cuda_upload(known(), both, sizeof(both));
}

CudaScaler::CudaScaler(int device) : device_(device) { scale_.reserve(device, 1); }

void CudaScaler::set_state(const ScalePolicy& policy, const ScaleState& state) {
  const DeviceScope scope(device_);
  static_assert(offsetof(CudaScale, policy) == 0 && sizeof(ScalePolicy) % 8 == 0);
  static_assert(offsetof(CudaScale, state) % 8 == 0 && sizeof(ScaleState) % 8 == 0);
  cuda_upload(&scale_.data()->policy, &policy, sizeof(policy));
  cuda_upload(&scale_.data()->state, &state, sizeof(state));
  cuda_wait(device_);  // whatever stream comes next finds it
}

ScaleState CudaScaler::wait_state() const {
  ScaleState state;
  cuda_copy(device_, &state, &scale_.data()->state, sizeof(state));
  return state;
}

void CudaScaler::scale(const TensorView& loss, const TensorView& out) {
  launch_scale(loss, 0.0f, scale_.data(), out);
}

// Asks the other ranks about what was measured, on the stream.
void CudaScaler::agree(const CudaOrder& order, const CudaRanks& ranks, CudaOptimizer* optimizer) {
  if (ranks.ranks == nullptr) return;
  const cudaStream_t stream = current_stream();
  const CudaMeasure& measure = optimizer->measure;
  optimizer->agreement.reserve(device_, 1);
  CudaAgreement* const agreement = optimizer->agreement.data();
  pack_kernel<<<1, 1, 0, stream>>>(measure.stats(), measure.count(), ranks.ranks->rank(),
                                   ranks.stand, order, scale_.data(), optimizer->known(),
                                   agreement);
  HEADROOM_CUDA(cudaGetLastError());
  ranks.ranks->enqueue(agreement->message.sums, Message::kSums, agreement->message.maxima,
                       Message::kMaxima, stream);
  unpack_kernel<<<1, 1, 0, stream>>>(measure.stats(), measure.count(),
                                     ranks.stand.gradients == RankGradients::kReplicated,
                                     scale_.data(), agreement, differences.data());
  HEADROOM_CUDA(cudaGetLastError());
}

void CudaScaler::unscale(const CudaOrder& order, const CudaRanks& ranks, CudaOptimizer* optimizer) {
  const DeviceScope scope(device_);
  const cudaStream_t stream = current_stream();
  CudaKnown* const known = optimizer->known();
  enter_kernel<<<1, 1, 0, stream>>>(scale_.data(), order, known);
  optimizer->measure.enqueue({.unscale = true}, &known->inverse);
  agree(order, ranks, optimizer);
  unscaled_kernel<<<1, 1, 0, stream>>>(optimizer->found(), optimizer->agreement.data(),
                                       scale_.data(), known);
  HEADROOM_CUDA(cudaGetLastError());
}

void CudaScaler::decide(const CudaOrder& order, const CudaTables& tables, const CudaRanks& ranks,
                        CudaOptimizer* optimizer) {
  const DeviceScope scope(device_);
  agree(order, ranks, optimizer);
  launch_early(decide_kernel, 1, kPrepareThreads + 32, optimizer->found(),
               optimizer->agreement.data(), order, scale_.data(), optimizer->known(),
               optimizer->reports.data(), tables);
}

void CudaScaler::update() {
  const DeviceScope scope(device_);
  launch_early(update_kernel, 1, 1, scale_.data(), alarms.data());
}

void CudaScaler::rescale(bool unscaled, CudaOptimizer* optimizer) {
  const DeviceScope scope(device_);
  const CudaScale* const scale = scale_.data();
  optimizer->measure.enqueue_rescale(unscaled ? &scale->state.scale : &scale->factor);
  rescaled_kernel<<<1, 1, 0, current_stream()>>>(scale_.data(), optimizer->known());
  HEADROOM_CUDA(cudaGetLastError());
}

void cuda_scale(const TensorView& loss, float scale, const TensorView& out) {
  launch_scale(loss, scale, nullptr, out);
}

}  // namespace headroom::internal
