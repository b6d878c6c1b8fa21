// ProcessGroupRanks: reductions through a c10d process group.
#include <headroom/error.h>
#include <headroom/libtorch/ranks.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tensors.h"

namespace headroom::libtorch {

ProcessGroupRanks::ProcessGroupRanks(Group group, std::chrono::milliseconds time_limit,
                                     const torch::Device& device)
    : group_(std::move(group)), time_limit_(time_limit), device_(device) {
  if (time_limit_ <= std::chrono::milliseconds(0)) {
    throw Error(ErrorCode::kInvalidArgument, "ProcessGroupRanks needs a time limit above 0.");
  }
}

// Gathers all messages on `device_` and combines them on the host; waits at most the time limit.
void ProcessGroupRanks::reduce(double* sums, size_t sum_count, double* maxima,
                               size_t maximum_count) {
  if (lost_) throw_lost_before();
  lost_ = true;  // cleared on success
  // New tensors in every call: a collective that timed out may still write to its own later.
  const torch::Tensor mine =
      torch::empty({static_cast<int64_t>(sum_count + maximum_count)}, torch::kDouble);
  std::copy_n(sums, sum_count, mine.data_ptr<double>());
  std::copy_n(maxima, maximum_count, mine.data_ptr<double>() + sum_count);
  Tensors from = {mine.to(device_)};
  std::vector<Tensors> to(1);
  for (int i = 0; i < group_.size; ++i) to[0].push_back(torch::empty_like(from[0]));
  try {
    group_.all_gather(to, from)->wait(time_limit_);
  } catch (const std::exception& error) {
    std::string why = error.what();  // keep the first line, without the stack trace of c10d
    why = why.substr(0, why.find('\n'));
    if (!why.empty() && why.back() == '.') why.pop_back();
    throw_did_not_come("(" + why + ")");
  }
  lost_ = false;
  // Every rank adds in the order of ranks, so that all get the same bits.
  for (int i = 0; i < group_.size; ++i) {
    const torch::Tensor theirs = to[0][static_cast<size_t>(i)].cpu();
    const double* const numbers = theirs.data_ptr<double>();
    for (size_t k = 0; k < sum_count; ++k) sums[k] = i == 0 ? numbers[k] : sums[k] + numbers[k];
    for (size_t k = 0; k < maximum_count; ++k) {
      const double number = numbers[sum_count + k];
      maxima[k] = i == 0 ? number : std::max(maxima[k], number);
    }
  }
}

// Tensors over the scaler's device memory; the group's all-reduces run on torch's current stream,
// which is the one that the scaler uses. Capture in a CUDA graph is possible if the group allows
// it.
void ProcessGroupRanks::enqueue(double* sums, size_t sum_count, double* maxima,
                                size_t maximum_count, void* stream) {
  if (!enqueues()) return Ranks::enqueue(sums, sum_count, maxima, maximum_count, stream);
  if (stream != internal::torch_stream_of(device_.index())) {
    throw Error(
        ErrorCode::kUnsupported,
        "The group's all-reduce runs on LibTorch's current stream, and this step on another; "
        "make the step's stream the current one (CUDAStreamGuard).");
  }
  const auto at = [&](double* data, size_t count) {
    return torch::from_blob(data, {static_cast<int64_t>(count)},
                            torch::TensorOptions(torch::kDouble).device(device_));
  };
  const auto all_reduce = [&](const torch::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
    Tensors tensors = {tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.timeout = time_limit_;
    group_.all_reduce(tensors, options)->wait();  // makes the current stream wait, not the host
  };
  all_reduce(at(sums, sum_count), c10d::ReduceOp::SUM);
  all_reduce(at(maxima, maximum_count), c10d::ReduceOp::MAX);
}

}  // namespace headroom::libtorch
