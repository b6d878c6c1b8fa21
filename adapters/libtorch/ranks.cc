#include <headroom/error.h>
#include <headroom/libtorch/ranks.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>

namespace headroom::libtorch {

ProcessGroupRanks::ProcessGroupRanks(int rank, int size, AllReduce all_reduce,
                                     std::chrono::milliseconds time_limit,
                                     const torch::Device& device)
    : rank_(rank),
      size_(size),
      all_reduce_(std::move(all_reduce)),
      time_limit_(time_limit),
      device_(device) {
  if (time_limit_ <= std::chrono::milliseconds(0)) {
    throw Error(ErrorCode::kInvalidArgument, "ProcessGroupRanks needs a time limit above 0.");
  }
}

ProcessGroupRanks::Work ProcessGroupRanks::all_reduce(const torch::Tensor& tensor,
                                                      c10d::ReduceOp::RedOpType op) {
  std::vector<torch::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.timeout = time_limit_;
  return all_reduce_(tensors, options);
}

void ProcessGroupRanks::reduce(double* sums, size_t sum_count, double* maxima,
                               size_t maximum_count) {
  if (lost_) {
    throw Error(ErrorCode::kRankLost,
                "Another rank was lost before; end the job and start from the last checkpoint.");
  }
  lost_ = true;  // unless all goes well
  // Tensors of their own: work that never ends may write to them at any time.
  const auto copy = [&](const double* values, size_t count) {
    torch::Tensor tensor = torch::empty({static_cast<int64_t>(count)}, torch::kDouble);
    std::copy_n(values, count, tensor.data_ptr<double>());
    return tensor.to(device_);
  };
  const torch::Tensor all_sums = copy(sums, sum_count);
  const torch::Tensor all_maxima = copy(maxima, maximum_count);
  try {
    // Both under way at once.
    const Work adding = all_reduce(all_sums, c10d::ReduceOp::SUM);
    const Work maximising = all_reduce(all_maxima, c10d::ReduceOp::MAX);
    adding->wait(time_limit_);
    maximising->wait(time_limit_);
  } catch (const std::exception& error) {
    std::string why = error.what();
    why = why.substr(0, why.find('\n'));
    if (!why.empty() && why.back() == '.') why.pop_back();
    throw Error(ErrorCode::kRankLost,
                "Another rank did not come to the same step (" + why + "); it is gone, stuck or " +
                    "out of step. Look at its output, end the job and start from the last "
                    "checkpoint.");
  }
  lost_ = false;
  const torch::Tensor sums_here = all_sums.cpu();
  const torch::Tensor maxima_here = all_maxima.cpu();
  std::copy_n(sums_here.data_ptr<double>(), sum_count, sums);
  std::copy_n(maxima_here.data_ptr<double>(), maximum_count, maxima);
}

void ProcessGroupRanks::enqueue(double* sums, size_t sum_count, double* maxima,
                                size_t maximum_count, void* stream) {
  if (!enqueues()) return Ranks::enqueue(sums, sum_count, maxima, maximum_count, stream);
  const auto at = [&](double* data, size_t count) {
    return torch::from_blob(data, {static_cast<int64_t>(count)},
                            torch::TensorOptions(torch::kDouble).device(device_));
  };
  // wait() lets the current stream wait, not the host.
  all_reduce(at(sums, sum_count), c10d::ReduceOp::SUM)->wait();
  all_reduce(at(maxima, maximum_count), c10d::ReduceOp::MAX)->wait();
}

}  // namespace headroom::libtorch
