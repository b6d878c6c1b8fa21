// One kernel updates all parameters with the same rule and types. It walks the list backwards,
// because the end of what the measuring pass has read is still in the L2 cache.
#include "apply/cuda.h"

#include <algorithm>

#include "apply/cuda.cuh"
#include "core/cuda.cuh"

namespace headroom::internal {
namespace {

// Tuned on an H200. One block processes one piece: persistent blocks that loop over pieces drift
// apart and are 1.1 times as slow. A piece is what the threads of a block load at once. Stores are
// plain: streaming stores were 10 % slower. Registers are limited to fit kResident blocks on a
// multiprocessor.
constexpr int kThreads = kStepThreads;
constexpr int kResident = 4;
static_assert(kPiece % CudaSamples::kGroup == 0);

__host__ __device__ int64_t pieces_of(int64_t count) { return (count + kPiece - 1) / kPiece; }

// Whether others have written weight i, see came_from().
template <typename W>
__device__ inline bool is_written(const W* weight, const float* master, int64_t i,
                                  bool stochastic_rounding) {
  const bool stochastic = std::is_same_v<W, bf16> && stochastic_rounding;
  return !came_from(master[i], weight[i].bits, from_float<W>(master[i]).bits, stochastic);
}

// Rounds to the type of the weight: to nearest, or at random as in round_stochastic().
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

// The arrays of one piece. Values holds kCount elements of each in registers; arrays that a rule or
// a kind of weight does not have are not loaded, and the compiler drops them.
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
      x->w.at[e] = updated<kRule, false>(n, to_float(x->g.at[e]) * n.multiplier, x->w.at[e],
                                         &x->m.at[e], &x->v.at[e]);
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

// Sets the masters of weights that others have written to these weights.
template <typename W>
__device__ void follow_weights(const W* weight, float* master, int count, bool stochastic) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    if (is_written(weight, master, i, stochastic)) master[i] = to_float(weight[i]);
  }
}

template <Rule kRule, typename G, typename W, bool kMaster>
__device__ void update_piece(const CudaSlot& slot, const RuleNumbers& n, uint64_t base,
                             int64_t first, int count, const ApplyJob& job) {
  using A = Arrays<kRule, G, W, kMaster>;
  const A a = {kMaster ? static_cast<float*>(slot.state.master) + first : nullptr,
               A::kNarrow ? static_cast<W*>(slot.weight) + first : nullptr,
               static_cast<G*>(slot.grad) + first,
               A::kStates > 0 ? static_cast<float*>(slot.state.moments[0]) + first : nullptr,
               A::kStates > 1 ? static_cast<float*>(slot.state.moments[1]) + first : nullptr};
  const auto thread = static_cast<int>(threadIdx.x);
  const auto finish = [&](int at, auto* x) {  // after load()
    a.update(n, job, first + at, base, x);
    a.store(at, job, *x);
  };
  int done = 0;
  if (a.aligned()) {
    // Both loads of an iteration are issued before the first result is needed.
    constexpr int kTwo = 2 * 4 * kThreads;  // elements that all threads process in one iteration
    for (; done + kTwo <= count; done += kTwo) {
      typename A::template Values<4> x, y;
      const int at = done + 4 * thread;
      a.load(at, &x);
      a.load(at + kTwo / 2, &y);
      finish(at, &x);
      finish(at + kTwo / 2, &y);
    }
    const int whole = count / 4 * 4;
    for (int at = done + 4 * thread; at < whole; at += 4 * kThreads) {
      typename A::template Values<4> x;
      a.load(at, &x);
      finish(at, &x);
    }
    done = whole;
  }
  for (int at = done + thread; at < count; at += kThreads) {
    typename A::template Values<1> x;
    a.load(at, &x);
    finish(at, &x);
  }
}

// Threads that compare one sample, each 4 of its elements.
constexpr int kSampleThreads = static_cast<int>(CudaSamples::kSize) / 4;
constexpr int kPieceThreads = static_cast<int>(kPiece / CudaSamples::kGroup) * kSampleThreads;

// Looks for weights that others have written in the samples of `pieces` pieces from `first_piece`
// on. Small slots are compared as a whole by step_kernel() instead. The kernel before, which
// prepares the step, touches neither weights nor masters: the samples are read while it runs.
template <typename W>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(CudaTables tables, int64_t first_piece, int64_t pieces, bool stochastic) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t piece = first_piece + min(thread / kPieceThreads, pieces - 1);
  const uint32_t index = tables.slot_of[piece];
  const CudaSlot& slot = tables.slots[index];
  const int64_t group = (piece - slot.first_piece) * (kPiece / CudaSamples::kGroup) +
                        thread % kPieceThreads / kSampleThreads;
  bool written = false;
  if (slot.count > CudaSamples::kWhole && group < CudaSamples::groups(slot.count)) {
    const int64_t first = CudaSamples::place(tables.sample_bases[index], group, slot.count) +
                          thread % kSampleThreads * 4;
#pragma unroll
    for (int64_t i = first; i < first + 4; ++i) {
      if (i >= slot.count) continue;
      written |= is_written(static_cast<const W*>(slot.weight),
                            static_cast<const float*>(slot.state.master), i, stochastic);
    }
  }
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (written) tables.numbers[index].follow = true;  // all that write this write the same
}

// Block b updates piece last_piece - b, or zeroes its gradients if the step is skipped. The verdict
// is on the device: the host launches this kernel before it is known.
template <Rule kRule, typename G, typename W, bool kMaster>
__global__ void __launch_bounds__(kThreads, kResident)
    step_kernel(CudaTables tables, int64_t last_piece, ApplyJob job, bool clear_skipped) {
  const int64_t piece = last_piece - static_cast<int64_t>(blockIdx.x);
  const uint32_t index = tables.slot_of[piece];
  const CudaSlot& slot = tables.slots[index];
  const int64_t first = (piece - slot.first_piece) * kPiece;
  const int size = static_cast<int>(min(static_cast<int64_t>(kPiece), slot.count - first));
  wait_for_kernel_before();
  const DeviceVerdict verdict = *tables.verdict;
  if (verdict.apply) {
    RuleNumbers n = tables.numbers[index].rule;
    n.multiplier = verdict.multiplier;
    if constexpr (kMaster && !std::is_same_v<W, float>) {
      if (first == 0 && threadIdx.x == 0) {
        tables.sample_bases[index] = tables.numbers[index].random_base;
      }
      if (tables.numbers[index].follow || slot.count <= CudaSamples::kWhole) {
        follow_weights(static_cast<const W*>(slot.weight) + first,
                       static_cast<float*>(slot.state.master) + first, size,
                       job.stochastic_rounding);
        __syncthreads();
      }
    }
    update_piece<kRule, G, W, kMaster>(slot, n, tables.numbers[index].random_base, first, size,
                                       job);
  } else if (clear_skipped) {
    G* const grad = static_cast<G*>(slot.grad) + first;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) grad[i] = G{};
  }
}

struct PickStepKernel {  // for select_kernel(); nvcc warns about a lambda
  template <Rule kRule, typename G, typename W, bool kMaster>
  StepKernel operator()() const {
    return step_kernel<kRule, G, W, kMaster>;
  }
};

// One block. The next kernel may start at once, because it waits for this one before it reads.
__global__ void prepare_kernel(CudaTables tables, float multiplier) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  prepare_numbers(tables);
  __syncthreads();
  prepare_verdict(tables, {true, multiplier});
}

// Fills the table that maps a piece to its slot. Block i does so for slot i.
__global__ void slot_of_kernel(const CudaSlot* slots, uint32_t* slot_of) {
  const CudaSlot& slot = slots[blockIdx.x];
  const int64_t end = slot.first_piece + pieces_of(slot.count);
  for (int64_t piece = slot.first_piece + threadIdx.x; piece < end; piece += blockDim.x) {
    slot_of[piece] = blockIdx.x;
  }
}

}  // namespace

// Sorts the slots so that those with the same kernel are adjacent: one launch for each kind.
void CudaApply::set_slots(int device, std::vector<CudaSlot> slots, size_t parameters,
                          uint64_t seed) {
  std::stable_sort(slots.begin(), slots.end(),
                   [&](const CudaSlot& a, const CudaSlot& b) { return a.kind < b.kind; });
  std::vector<Launch> launches;
  int64_t pieces = 0;
  for (CudaSlot& slot : slots) {
    if (slot.grad == nullptr) slot.count = 0;
    slot.first_piece = pieces;
    if (slot.count == 0) continue;
    if (launches.empty() || launches.back().kind != slot.kind) {
      launches.push_back({slot.kind, pieces, 0});
    }
    launches.back().pieces += pieces_of(slot.count);
    pieces += pieces_of(slot.count);
  }
  step_array_.reserve(device, parameters);  // there may be more parameters on other devices
  if (slots == slots_) return;
  const DeviceScope scope(device);
  device_ = device;
  seed_ = seed;
  slots_.clear();  // if something below throws, the next call uploads everything
  slot_array_.reserve(device, slots.size());
  slot_of_array_.reserve(device, static_cast<size_t>(pieces));
  number_array_.reserve(device, slots.size());
  sample_base_array_.reserve(device, slots.size());
  verdict_array_.reserve(device, 1);
  cuda_upload(slot_array_.data(), slots.data(), slots.size() * sizeof(CudaSlot));
  slot_of_kernel<<<static_cast<unsigned>(slots.size()), 256, 0, current_stream()>>>(
      slot_array_.data(), slot_of_array_.data());
  HEADROOM_CUDA(cudaGetLastError());
  slots_ = std::move(slots);
  launches_ = std::move(launches);
}

// Uploads only if an option has changed.
void CudaApply::set_groups(const std::vector<RuleSettings>& groups) {
  if (groups == groups_) return;
  const DeviceScope scope(device_);
  groups_.clear();
  group_array_.reserve(device_, groups.size());
  cuda_upload(group_array_.data(), groups.data(), groups.size() * sizeof(RuleSettings));
  groups_ = groups;
}

void CudaApply::set_steps(const std::vector<int64_t>& steps) {
  const DeviceScope scope(device_);
  cuda_upload(step_array_.data(), steps.data(), steps.size() * sizeof(int64_t));
}

std::vector<int64_t> CudaApply::wait_steps(size_t parameters) const {
  std::vector<int64_t> steps(parameters);
  cuda_copy(device_, steps.data(), step_array_.data(), steps.size() * sizeof(int64_t));
  return steps;
}

void CudaApply::prepare(float multiplier) {
  const DeviceScope scope(device_);
  launch_early(prepare_kernel, 1, kPrepareThreads, tables(), multiplier);
}

// Kinds are launched from the last to the first, like the pieces within a kind.
void CudaApply::step(const ApplyJob& job, bool clear_skipped) {
  const DeviceScope scope(device_);
  for (auto launch = launches_.rbegin(); launch != launches_.rend(); ++launch) {
    const KernelKind& kind = launch->kind;
    if (!has_master(kind.weight) || kind.state != StateFormat::kFull) continue;
    auto* const sample =
        kind.weight == WeightKind::kF16Master ? sample_kernel<f16> : sample_kernel<bf16>;
    const int64_t blocks = (launch->pieces * kPieceThreads + kThreads - 1) / kThreads;
    launch_early(sample, static_cast<unsigned>(blocks), kThreads, tables(), launch->first_piece,
                 launch->pieces, job.stochastic_rounding);
  }
  for (auto launch = launches_.rbegin(); launch != launches_.rend(); ++launch) {
    const bool full = launch->kind.state == StateFormat::kFull;
    const StepKernel kernel =
        full ? select_kernel(launch->kind, PickStepKernel()) : compact_step_kernel(launch->kind);
    launch_early(kernel, static_cast<unsigned>(launch->pieces), full ? kThreads : kCompactThreads,
                 tables(), launch->first_piece + launch->pieces - 1, job, clear_skipped);
  }
}

namespace {

// See FusedOptimizer::follow_weight().
template <typename T>
__global__ void follow_kernel(const T* weight, float* master, int64_t count, bool stochastic) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    if (is_written(weight, master, i, stochastic)) master[i] = to_float(weight[i]);
  }
}

}  // namespace

void cuda_follow(const TensorView& weight, float* master, bool stochastic) {
  if (weight.count == 0) return;
  const DeviceScope scope(weight.device.index);
  const int blocks = 8 * device_facts().multiprocessors;
  with_type<f16, bf16>(weight.dtype, [&](auto element) {
    follow_kernel<<<blocks, 256, 0, current_stream()>>>(
        static_cast<const decltype(element)*>(weight.data), master, weight.count, stochastic);
  });
  HEADROOM_CUDA(cudaGetLastError());
}

}  // namespace headroom::internal
