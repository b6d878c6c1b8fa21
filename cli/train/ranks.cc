#include "cli/train/ranks.h"

#include <fmt/format.h>
#include <headroom/error.h>
#include <torch/torch.h>

#include <charconv>
#include <cstdlib>
#include <optional>

namespace headroom::cli {
namespace {

constexpr int64_t kBucket = int64_t{1} << 23;  // elements per all-reduce

std::optional<int> number_in(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  int value = 0;
  const char* const end = text + std::char_traits<char>::length(text);
  const auto [read, error] = std::from_chars(text, end, value);
  if (error != std::errc() || read != end || value < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("The environment has {}='{}'; it must be a number of ranks.", name, text));
  }
  return value;
}

// The end of the bucket of parameters that begins at index `begin`.
size_t bucket_end(const std::vector<torch::Tensor>& parameters, size_t begin) {
  int64_t elements = 0;
  size_t end = begin;
  while (end < parameters.size() && (end == begin || elements + parameters[end].numel() <= kBucket))
    elements += parameters[end++].numel();
  return end;
}

}  // namespace

Launch launch_from_environment() {
  Launch launch;
  const auto mpi_size = number_in("OMPI_COMM_WORLD_SIZE");
  const auto size = number_in("WORLD_SIZE");
  if (mpi_size.value_or(1) > 1) {
    launch.by = Launch::By::kMpirun;
    launch.size = *mpi_size;
    launch.rank = number_in("OMPI_COMM_WORLD_RANK").value_or(0);
    launch.local_size = number_in("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(launch.size);
  } else if (size.value_or(1) > 1) {
    const auto rank = number_in("RANK");
    if (!rank.has_value() || std::getenv("MASTER_ADDR") == nullptr ||
        !number_in("MASTER_PORT").has_value()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("The environment has WORLD_SIZE={}, but not all of RANK, MASTER_ADDR "
                              "and MASTER_PORT; set them, or use torchrun or mpirun.",
                              *size));
    }
    launch.by = Launch::By::kTorchrun;
    launch.size = *size;
    launch.rank = *rank;
    launch.local_size = number_in("LOCAL_WORLD_SIZE").value_or(launch.size);
  }
  if (launch.rank >= launch.size) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("According to the environment this is rank {} of {}; ranks count from 0.",
                    launch.rank, launch.size));
  }
  return launch;
}

std::unique_ptr<Team> make_team(const Launch& launch, std::chrono::milliseconds time_limit) {
  if (!launch.several()) return nullptr;
  const bool mpi = launch.by == Launch::By::kMpirun;
  auto team = mpi ? make_mpi_team(time_limit) : make_gloo_team(launch, time_limit);
  if (team == nullptr) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("This process is one of {} ranks started by {}, but this build of headroom "
                    "has no {}; install {} and build again.",
                    launch.size, mpi ? "mpirun" : "torchrun", mpi ? "MPI" : "Gloo",
                    mpi ? "libopenmpi-dev" : "libgloo-dev"));
  }
  return team;
}

bool Team::average(const std::vector<torch::Tensor>& parameters, double* loss, bool stop) {
  const torch::NoGradGuard no_grad;
  const double size = ranks_->size();
  bool stop_all = false;
  for (size_t begin = 0; begin < parameters.size();) {
    const size_t end = bucket_end(parameters, begin);
    std::vector<torch::Tensor> parts;
    for (size_t i = begin; i < end; ++i) {
      const torch::Tensor& parameter = parameters[i];
      parts.push_back(parameter.grad().defined() ? parameter.grad().to(torch::kFloat).flatten()
                                                 : torch::zeros({parameter.numel()}));
    }
    // The loss and the stop flag are sent along with every bucket, and used from the first.
    parts.push_back(torch::tensor({static_cast<float>(*loss), stop ? 1.0f : 0.0f}));
    torch::Tensor flat = torch::cat(parts);
    all_reduce_sum(flat.data_ptr<float>(), flat.numel());
    if (begin == 0) {
      const float* const extra = flat.data_ptr<float>() + flat.numel() - 2;
      *loss = static_cast<double>(extra[0]) / size;
      stop_all = extra[1] > 0.0f;
    }
    flat.div_(size);
    int64_t at = 0;
    for (size_t i = begin; i < end; ++i) {
      const torch::Tensor& parameter = parameters[i];
      const torch::Tensor mean =
          flat.narrow(0, at, parameter.numel()).reshape_as(parameter).to(parameter.dtype());
      at += parameter.numel();
      if (parameter.grad().defined()) {
        parameter.grad().copy_(mean);
      } else {
        parameter.mutable_grad() = mean.clone();
      }
    }
    begin = end;
  }
  return stop_all;
}

void Team::check_same(const std::vector<torch::Tensor>& parameters) {
  uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  for (const torch::Tensor& parameter : parameters) {
    const torch::Tensor values = parameter.detach().cpu().contiguous();
    const auto* const bytes = static_cast<const unsigned char*>(values.data_ptr());
    for (size_t i = 0; i < values.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001B3u;
  }
  const auto weights = static_cast<double>(hash >> 12);
  double both[2] = {weights, -weights};
  ranks_->reduce(nullptr, 0, both, 2);
  if (both[0] != -both[1]) {
    throw Error(ErrorCode::kRanksDiffer,
                "The ranks have different weights; start all of them with the same options and "
                "the same data.");
  }
}

}  // namespace headroom::cli
