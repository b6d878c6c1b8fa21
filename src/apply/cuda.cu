// One kernel updates all parameters. It walks the list from its end: what the measuring pass read
// last is still in the cache.
#include "apply/cuda.h"

#include <algorithm>

#include "core/cuda.cuh"

namespace headroom::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8192;  // elements

// The rules, in the same operations and order as kernels-inl.h. The file is compiled without fused
// multiply-add, so that the bits are the same too.
template <Rule kRule>
__device__ inline float updated(const RuleNumbers& n, float g, float w, float* s0, float* s1) {
  g = g + n.l2 * w;
  if constexpr (kRule == Rule::kSgd) {
    return w - n.lr * g;
  } else if constexpr (kRule == Rule::kSgdMomentum) {
    const float b = n.momentum * *s0 + n.damped * g;
    *s0 = b;
    return w - n.lr * (n.from_grad * g + n.from_buffer * b);
  } else {
    const float m = *s0 + n.beta1_rest * (g - *s0);
    const float v = n.beta2 * *s1 + n.beta2_rest * (g * g);
    *s0 = m;
    *s1 = v;
    const float denominator = sqrtf(v) * n.correction2 + n.eps;
    return n.keep * w - n.step_size * (m / denominator);
  }
}

template <typename W>
__device__ inline W rounded(float w, const ApplyJob& job, int64_t index, uint64_t base) {
  if constexpr (std::is_same_v<W, bf16>) {
    if (job.stochastic_rounding) {
      const auto i = static_cast<uint64_t>(index);
      return round_stochastic(w, static_cast<uint32_t>(i), random_key_at(base, i));
    }
  }
  return from_float<W>(w);
}

template <Rule kRule, typename G, typename W, bool kMaster>
__device__ void update_piece(const CudaSlot& slot, int64_t first, int count, const ApplyJob& job) {
  constexpr int kStates = static_cast<int>(state_buffers(kRule));
  const RuleNumbers n = slot.numbers;
  float* const master = kMaster ? slot.master + first : nullptr;
  W* const weight = static_cast<W*>(slot.weight) + first;
  G* const grad = static_cast<G*>(slot.grad) + first;
  float* const s0 = kStates > 0 ? slot.state[0] + first : nullptr;
  float* const s1 = kStates > 1 ? slot.state[1] + first : nullptr;
  constexpr bool kNarrow = !std::is_same_v<W, float>;
  int done = 0;
  const bool aligned = aligned_16(master) && (!kNarrow || aligned_16(weight)) && aligned_16(grad) &&
                       aligned_16(s0) && aligned_16(s1);
  if (aligned) {
    const int vectors = count / 8;
    for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads) {
      const int at = v * 8;
      Eight<float> w, m, q;
      Eight<W> narrow;
      const Eight<G> g = load_eight(grad + at, false);
      if constexpr (kMaster) w = load_eight(master + at, true);
      if constexpr (!kMaster) narrow = load_eight(weight + at, true);
      if constexpr (kStates > 0) m = load_eight(s0 + at, true);
      if constexpr (kStates > 1) q = load_eight(s1 + at, true);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if constexpr (!kMaster) w.at[e] = to_float(narrow.at[e]);
        w.at[e] = updated<kRule>(n, to_float(g.at[e]) * n.multiplier, w.at[e], &m.at[e], &q.at[e]);
        if constexpr (kNarrow) {
          narrow.at[e] = rounded<W>(w.at[e], job, first + at + e, slot.random_base);
        }
      }
      if constexpr (kMaster) store_eight(master + at, w);
      if constexpr (kNarrow) store_eight(weight + at, narrow);
      if constexpr (kStates > 0) store_eight(s0 + at, m);
      if constexpr (kStates > 1) store_eight(s1 + at, q);
      if (job.clear_grads) store_eight(grad + at, Eight<G>{});
    }
    done = vectors * 8;
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    float w = 0.0f, m = 0.0f, q = 0.0f;
    if constexpr (kMaster) w = master[i];
    if constexpr (!kMaster) w = to_float(weight[i]);
    if constexpr (kStates > 0) m = s0[i];
    if constexpr (kStates > 1) q = s1[i];
    w = updated<kRule>(n, to_float(grad[i]) * n.multiplier, w, &m, &q);
    if constexpr (kMaster) master[i] = w;
    if constexpr (kNarrow) weight[i] = rounded<W>(w, job, first + i, slot.random_base);
    if constexpr (kStates > 0) s0[i] = m;
    if constexpr (kStates > 1) s1[i] = q;
    if (job.clear_grads) grad[i] = G{};
  }
}

template <Rule kRule, typename G>
__device__ void update_kind(const CudaSlot& slot, int64_t first, int count, const ApplyJob& job) {
  switch (slot.kind) {
    case WeightKind::kF32:
      return update_piece<kRule, G, float, true>(slot, first, count, job);
    case WeightKind::kF16Master:
      return update_piece<kRule, G, f16, true>(slot, first, count, job);
    case WeightKind::kBF16Master:
      return update_piece<kRule, G, bf16, true>(slot, first, count, job);
    case WeightKind::kF16:
      return update_piece<kRule, G, f16, false>(slot, first, count, job);
    case WeightKind::kBF16:
      return update_piece<kRule, G, bf16, false>(slot, first, count, job);
  }
}

template <Rule kRule>
__device__ void update_grad(const CudaSlot& slot, int64_t first, int count, const ApplyJob& job) {
  if (slot.grad_type == DType::kF16) update_kind<kRule, f16>(slot, first, count, job);
  if (slot.grad_type == DType::kBF16) update_kind<kRule, bf16>(slot, first, count, job);
  if (slot.grad_type == DType::kF32) update_kind<kRule, float>(slot, first, count, job);
}

template <Rule kRule>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(const CudaSlot* slots, int count, int64_t pieces, ApplyJob job) {
  __shared__ CudaSlot slot;
  for (int64_t k = blockIdx.x; k < pieces; k += gridDim.x) {
    const int64_t piece = pieces - 1 - k;
    __syncthreads();
    if (threadIdx.x == 0) {
      int low = 0, high = count - 1;
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (slots[middle].first_piece <= piece) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      slot = slots[low];
    }
    __syncthreads();
    if (slot.rule != kRule) continue;
    const int64_t first = (piece - slot.first_piece) * kPiece;
    const int size = static_cast<int>(min(static_cast<int64_t>(kPiece), slot.count - first));
    update_grad<kRule>(slot, first, size, job);
  }
}

}  // namespace

void CudaApply::apply(int device, std::vector<CudaSlot>* slots, const ApplyJob& job) {
  int64_t pieces = 0;
  bool used[kRules] = {};
  for (CudaSlot& slot : *slots) {
    slot.first_piece = pieces;
    pieces += (slot.count + kPiece - 1) / kPiece;
    used[static_cast<size_t>(slot.rule)] = true;
  }
  if (pieces == 0) return;
  const DeviceScope scope(device);
  const cudaStream_t stream = current_stream();
  if (slots->size() > capacity_) {
    capacity_ = 2 * slots->size();
    table_ = CudaBuffer(device, capacity_ * sizeof(CudaSlot));
  }
  HEADROOM_CUDA(cudaMemcpyAsync(table_.data(), slots->data(), slots->size() * sizeof(CudaSlot),
                                cudaMemcpyHostToDevice, stream));
  const auto* const table = static_cast<const CudaSlot*>(table_.data());
  const auto count = static_cast<int>(slots->size());
  const auto grid = static_cast<unsigned>(std::min<int64_t>(pieces, 4 * multiprocessors()));
  if (used[0]) apply_kernel<Rule::kSgd><<<grid, kThreads, 0, stream>>>(table, count, pieces, job);
  if (used[1]) {
    apply_kernel<Rule::kSgdMomentum><<<grid, kThreads, 0, stream>>>(table, count, pieces, job);
  }
  if (used[2]) apply_kernel<Rule::kAdam><<<grid, kThreads, 0, stream>>>(table, count, pieces, job);
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace headroom::internal
