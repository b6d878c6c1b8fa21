// One kernel updates all parameters. It walks the list from its end: what the measuring pass read
// last is still in the cache.
#include "apply/cuda.h"

#include <algorithm>

#include "core/cuda.cuh"

namespace headroom::internal {
namespace {

// Measured on an H200: one block a piece (blocks that stay and take turns drift apart, 1.1 times as
// slow), pieces of two turns of the block, plain stores (streaming ones cost a tenth), registers
// for 4 blocks on a multiprocessor.
constexpr int kThreads = 256;
constexpr int kResident = 4;
constexpr int kPiece = 2048;  // elements

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

// A parameter's arrays at some element, and kCount of their elements in registers.
template <Rule kRule, typename G, typename W, bool kMaster>
struct Arrays {
  static constexpr size_t kStates = state_buffers(kRule);
  static constexpr bool kNarrow = !std::is_same_v<W, float>;
  float* master;
  W* weight;
  G* grad;
  float* s0;
  float* s1;

  __device__ bool aligned() const {
    return aligned_16(master) && aligned_16(weight) && aligned_16(grad) && aligned_16(s0) &&
           aligned_16(s1);
  }

  template <int kCount>
  struct Values {
    Pack<float, kCount> w, m, v;
    Pack<W, kCount> narrow;
    Pack<G, kCount> g;
  };

  template <int kCount>
  __device__ void load(int at, Values<kCount>* x) const {
    x->g = load_pack<kCount>(grad + at);
    if constexpr (kMaster) x->w = load_pack<kCount>(master + at);
    if constexpr (!kMaster) x->narrow = load_pack<kCount>(weight + at);
    if constexpr (kStates > 0) x->m = load_pack<kCount>(s0 + at);
    if constexpr (kStates > 1) x->v = load_pack<kCount>(s1 + at);
  }

  template <int kCount>
  __device__ void update(const RuleNumbers& n, const ApplyJob& job, int64_t index, uint64_t base,
                         Values<kCount>* x) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if constexpr (!kMaster) x->w.at[e] = to_float(x->narrow.at[e]);
      x->w.at[e] = updated<kRule>(n, to_float(x->g.at[e]) * n.multiplier, x->w.at[e], &x->m.at[e],
                                  &x->v.at[e]);
      if constexpr (kNarrow) x->narrow.at[e] = rounded<W>(x->w.at[e], job, index + e, base);
    }
  }

  template <int kCount>
  __device__ void store(int at, const ApplyJob& job, const Values<kCount>& x) const {
    if constexpr (kMaster) store_pack(master + at, x.w);
    if constexpr (kNarrow) store_pack(weight + at, x.narrow);
    if constexpr (kStates > 0) store_pack(s0 + at, x.m);
    if constexpr (kStates > 1) store_pack(s1 + at, x.v);
    if (job.clear_grads) store_pack(grad + at, Pack<G, kCount>{});
  }
};

template <Rule kRule, typename G, typename W, bool kMaster>
__device__ void update_piece(const CudaSlot& slot, int64_t first, int count, const ApplyJob& job) {
  using A = Arrays<kRule, G, W, kMaster>;
  const RuleNumbers n = slot.numbers;
  const uint64_t base = slot.random_base;
  const A a = {kMaster ? slot.master + first : nullptr,
               A::kNarrow ? static_cast<W*>(slot.weight) + first : nullptr,
               static_cast<G*>(slot.grad) + first, A::kStates > 0 ? slot.state[0] + first : nullptr,
               A::kStates > 1 ? slot.state[1] + first : nullptr};
  const auto thread = static_cast<int>(threadIdx.x);
  int done = 0;
  if (a.aligned()) {
    constexpr int kTwo = 2 * 4 * kThreads;  // elements of two turns of all threads
    for (; done + kTwo <= count; done += kTwo) {
      typename A::template Values<4> x, y;
      const int at = done + 4 * thread;
      a.template load<4>(at, &x);
      a.template load<4>(at + kTwo / 2, &y);
      a.template update<4>(n, job, first + at, base, &x);
      a.template store<4>(at, job, x);
      a.template update<4>(n, job, first + at + kTwo / 2, base, &y);
      a.template store<4>(at + kTwo / 2, job, y);
    }
    const int whole = count / 4 * 4;
    for (int at = done + 4 * thread; at < whole; at += 4 * kThreads) {
      typename A::template Values<4> x;
      a.template load<4>(at, &x);
      a.template update<4>(n, job, first + at, base, &x);
      a.template store<4>(at, job, x);
    }
    done = whole;
  }
  for (int i = done + thread; i < count; i += kThreads) {
    float w = 0.0f, m = 0.0f, v = 0.0f;
    if constexpr (kMaster) w = a.master[i];
    if constexpr (!kMaster) w = to_float(a.weight[i]);
    if constexpr (A::kStates > 0) m = a.s0[i];
    if constexpr (A::kStates > 1) v = a.s1[i];
    w = updated<kRule>(n, to_float(a.grad[i]) * n.multiplier, w, &m, &v);
    if constexpr (kMaster) a.master[i] = w;
    if constexpr (A::kNarrow) a.weight[i] = rounded<W>(w, job, first + i, base);
    if constexpr (A::kStates > 0) a.s0[i] = m;
    if constexpr (A::kStates > 1) a.s1[i] = v;
    if (job.clear_grads) a.grad[i] = G{};
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
__global__ void __launch_bounds__(kThreads, kResident)
    apply_kernel(const CudaSlot* slots, const uint32_t* slot_of, int64_t pieces, ApplyJob job) {
  const int64_t piece = pieces - 1 - static_cast<int64_t>(blockIdx.x);
  const CudaSlot& slot = slots[slot_of[piece]];
  if (slot.rule != kRule) return;
  const int64_t first = (piece - slot.first_piece) * kPiece;
  const int size = static_cast<int>(min(static_cast<int64_t>(kPiece), slot.count - first));
  update_grad<kRule>(slot, first, size, job);
}

}  // namespace

void CudaApply::apply(int device, std::vector<CudaSlot>* slots, const ApplyJob& job) {
  bool used[kRules] = {};
  std::vector<int64_t> counts;
  int64_t pieces = 0;
  for (CudaSlot& slot : *slots) {
    slot.first_piece = pieces;
    pieces += (slot.count + kPiece - 1) / kPiece;
    counts.push_back(slot.count);
    used[static_cast<size_t>(slot.rule)] = true;
  }
  if (pieces == 0) return;
  const DeviceScope scope(device);
  const cudaStream_t stream = current_stream();
  if (counts != counts_) {
    std::vector<uint32_t> slot_of;
    slot_of.reserve(static_cast<size_t>(pieces));
    for (size_t i = 0; i < slots->size(); ++i) {
      const auto end =
          static_cast<size_t>((*slots)[i].first_piece + (counts[i] + kPiece - 1) / kPiece);
      slot_of.resize(end, static_cast<uint32_t>(i));
    }
    table_ = CudaBuffer(device, slots->size() * sizeof(CudaSlot));
    slot_of_ = CudaBuffer(device, slot_of.size() * sizeof(uint32_t));
    cuda_copy(slot_of_.data(), slot_of.data(), slot_of.size() * sizeof(uint32_t));
    counts_ = counts;
  }
  HEADROOM_CUDA(cudaMemcpyAsync(table_.data(), slots->data(), slots->size() * sizeof(CudaSlot),
                                cudaMemcpyHostToDevice, stream));
  const auto* const table = static_cast<const CudaSlot*>(table_.data());
  const auto* const slot_of = static_cast<const uint32_t*>(slot_of_.data());
  const auto grid = static_cast<unsigned>(pieces);
  if (used[0]) apply_kernel<Rule::kSgd><<<grid, kThreads, 0, stream>>>(table, slot_of, pieces, job);
  if (used[1]) {
    apply_kernel<Rule::kSgdMomentum><<<grid, kThreads, 0, stream>>>(table, slot_of, pieces, job);
  }
  if (used[2])
    apply_kernel<Rule::kAdam><<<grid, kThreads, 0, stream>>>(table, slot_of, pieces, job);
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace headroom::internal
