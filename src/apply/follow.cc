// Finds weights that others have written, whose masters have to follow.
#include <atomic>

#include "apply/fused.h"
#include "core/parallel.h"

namespace headroom::internal {
namespace {

bool rounded_at_random(const Slot& slot, const Precision& precision) {
  return slot.kind == WeightKind::kBF16Master && precision.stochastic_rounding;
}

}  // namespace

void find_written(const std::vector<Parameter>& parameters, FusedState* state) {
  for (const FusedState::SampleJob& job : state->sample_jobs) state->follow[job.owner] = 0;
  // 64 samples of 64 elements each: an FP32 master and a 16-bit weight.
  constexpr size_t kJobBytes = 64 * CpuSamples::kSize * (sizeof(float) + sizeof(uint16_t));
  parallel_for(state->sample_jobs.size(), state->sample_jobs.size() * kJobBytes, [&](size_t i) {
    const FusedState::SampleJob& job = state->sample_jobs[i];
    const Slot& slot = state->slots[job.owner];
    const TensorView& weight = parameters[job.owner].weight;
    const SampleSpan span = {
        .master = static_cast<const float*>(slot.arrays.master),
        .weight = weight.data,
        .count = weight.count,
        .first_group = job.first_group,
        .end_group = job.end_group,
        .random_base = random_base(state->precision.seed, job.owner, slot.steps),
        .stochastic = rounded_at_random(slot, state->precision)};
    if (!follow_kernels(weight.dtype).samples_written(span)) return;
    // Relaxed: several jobs may store the same 1, which is read after parallel_for() has returned.
    std::atomic_ref(state->follow[job.owner]).store(1, std::memory_order_relaxed);
  });
}

void follow(const TensorView& weight, const Slot& slot, const Precision& precision) {
  const bool stochastic = rounded_at_random(slot, precision);
  auto* const master = static_cast<float*>(slot.arrays.master);
  if (weight.device.type == DeviceType::kCUDA) return cuda_follow(weight, master, stochastic);
  const auto count = static_cast<size_t>(weight.count);
  follow_kernels(weight.dtype).follow(master, weight.data, count, stochastic);
}

}  // namespace headroom::internal
