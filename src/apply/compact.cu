// The step kernels for compact formats of masters and moments, see formats.h. As in cuda.cu, a
// block updates one piece.
//
// In the time of the 12 bytes of an element there is room for some 80 instructions. So everything
// is loaded before anything is used, bytes are converted in words (formats.cuh), there is a kernel
// of its own for gradients of the type of the weight, and what is not whole takes a path of its
// own.
#include "apply/cuda.cuh"
#include "apply/formats.cuh"

namespace headroom::internal {
namespace {

// Tuned on an H200, see docs/performance.md: more blocks on a multiprocessor, larger pieces and
// loads of only one set of elements at a time are all slower.
constexpr int kResident = 6;  // blocks on a multiprocessor; limits registers
static_assert(kPiece % (kCompactThreads * kEach) == 0);

// The hash of a thread's elements, see dither_word().
__device__ inline uint32_t hash_of(const CudaNumbers& numbers, int64_t at) {
  const bool low = at >> 32 == 0;
  const uint32_t key =
      low ? numbers.random_key : random_key_at(numbers.random_base, static_cast<uint64_t>(at));
  return dither_hash(static_cast<uint32_t>(at), key);
}

// Everything of kEach elements of a thread.
template <Rule kRule, typename G, typename W, StateFormat kFormat, bool kWhole>
struct Elements {
  static constexpr size_t kStates = state_buffers(kRule);
  static constexpr bool kByte = kFormat == StateFormat::kByte;
  std::conditional_t<kByte, ByteMoments<FirstMoment>, HalfMoments<FirstMoment>> first;
  std::conditional_t<kByte, ByteMoments<SecondMoment>, HalfMoments<SecondMoment>> second;
  Weights<W, kFormat> weights;
  Grads<G> grads;
  int64_t at;
  int count;

  __device__ void load(const CudaSlot& slot, int64_t index) {
    at = index;
    const int64_t left = slot.count - index;
    count = kWhole ? kEach : static_cast<int>(left < 0 ? 0 : left < kEach ? left : kEach);
    grads.template load<kWhole>(slot, at, count);
    weights.template load<kWhole>(slot, at, count);
    if constexpr (kStates > 0) first.template load<kWhole>(slot.state, at, count);
    if constexpr (kStates > 1) second.template load<kWhole>(slot.state, at, count);
  }

  __device__ void update(const CudaNumbers& numbers, float multiplier) {
    const uint32_t hash = hash_of(numbers, at);
    const RuleNumbers n = numbers.rule;
    float g[kEach], w[kEach], m[kEach], v[kEach];
    grads.decode(g);
    weights.decode(w);
    if constexpr (kStates > 0) first.template decode<kWhole>(count, m);
    if constexpr (kStates > 1) second.template decode<kWhole>(count, v);
#pragma unroll
    for (int e = 0; e < kEach; ++e) g[e] *= multiplier;
    if (n.l2 != 0.0f) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) g[e] += n.l2 * w[e];
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) w[e] = updated<kRule, true>(n, g[e], w[e], &m[e], &v[e]);
    weights.template store<kWhole>(w, hash, count);
    float largest_m = 0.0f, largest_v = 0.0f;
    if constexpr (kStates > 0) largest_m = first.largest_of(m);
    if constexpr (kStates > 1) largest_v = second.largest_of(v);
    if (larger(float_bits(largest_m), float_bits(largest_v)) > kLargestMoment) {
      if constexpr (kStates > 0) first.limit(m, &largest_m);
      if constexpr (kStates > 1) second.limit(v, &largest_v);
    }
    if constexpr (kStates > 0) first.template store<kWhole>(m, largest_m, hash, count);
    if constexpr (kStates > 1) second.template store<kWhole>(v, largest_v, hash, count);
  }
};

// The piece from element `begin` on, if the step is applied. A thread loads its next elements
// before it updates those that it has, and the first ones before it knows the verdict.
template <Rule kRule, typename G, typename W, StateFormat kFormat, bool kWhole>
__device__ void update_piece(const CudaTables& tables, uint32_t index, int64_t begin) {
  constexpr int kRound = kCompactThreads * kEach;  // elements of the block
  constexpr int kRounds = kPiece / kRound;
  const CudaSlot& slot = tables.slots[index];
  const CudaNumbers& numbers = tables.numbers[index];
  const int64_t at = begin + static_cast<int>(threadIdx.x) * kEach;
  if constexpr (kWhole) {
    Elements<kRule, G, W, kFormat, true> elements[kRounds];
    elements[0].load(slot, at);
    const DeviceVerdict verdict = *tables.verdict;
    if (!verdict.apply) return;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i + 1 < kRounds) elements[i + 1].load(slot, at + (i + 1) * kRound);
      elements[i].update(numbers, verdict.multiplier);
    }
  } else {
    const DeviceVerdict verdict = *tables.verdict;
#pragma unroll 1
    for (int i = 0; i < kRounds && verdict.apply; ++i) {
      Elements<kRule, G, W, kFormat, false> elements;
      elements.load(slot, at + i * kRound);
      elements.update(numbers, verdict.multiplier);
    }
  }
}

__device__ void clear_piece(const CudaSlot& slot, int64_t begin) {
  const int halves = slot.kind.grad == DType::kF32 ? 2 : 1;
  const int64_t left = slot.count - begin;
  const int64_t count = (left < kPiece ? left : kPiece) * halves;
  auto* const grad = static_cast<uint16_t*>(slot.grad) + begin * halves;
  for (int64_t i = threadIdx.x; i < count; i += kCompactThreads) grad[i] = 0;
}

// As step_kernel() of cuda.cu. All threads of a block get to the end, for the shuffles.
template <Rule kRule, typename G, typename W, StateFormat kFormat>
__global__ void __launch_bounds__(kCompactThreads, kResident)
    compact_kernel(CudaTables tables, int64_t last_piece, ApplyJob job, bool clear_skipped) {
  const int64_t piece = last_piece - static_cast<int64_t>(blockIdx.x);
  const uint32_t index = tables.slot_of[piece];
  const CudaSlot& slot = tables.slots[index];
  const int64_t begin = (piece - slot.first_piece) * kPiece;
  const bool whole = slot.count - begin >= kPiece && aligned_16(slot.grad) &&
                     aligned_16(slot.weight) && aligned_16(slot.state.master);
  wait_for_kernel_before();
  if (whole) {
    update_piece<kRule, G, W, kFormat, true>(tables, index, begin);
  } else {
    update_piece<kRule, G, W, kFormat, false>(tables, index, begin);
  }
  const DeviceVerdict verdict = *tables.verdict;
  if (verdict.apply ? job.clear_grads : clear_skipped) {
    __syncthreads();
    clear_piece(slot, begin);
  }
}

// For select_compact_kernel(); nvcc warns about a lambda. `own`: gradients have the type of
// weights.
struct PickCompactKernel {
  bool own;
  template <Rule kRule, typename W, StateFormat kFormat>
  StepKernel operator()() const {
    return own ? compact_kernel<kRule, W, W, kFormat> : compact_kernel<kRule, void, W, kFormat>;
  }
};

}  // namespace

StepKernel compact_step_kernel(const KernelKind& kind) {
  const DType weight = kind.weight == WeightKind::kF16Master    ? DType::kF16
                       : kind.weight == WeightKind::kBF16Master ? DType::kBF16
                                                                : DType::kF32;
  return select_compact_kernel(kind, PickCompactKernel{kind.grad == weight});
}

}  // namespace headroom::internal
