// The job over c10d's Gloo, with torchrun's environment variables.
#include <headroom/libtorch/ranks.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tests/agree/job.h"

int main(int argc, char** argv) {
  using namespace headroom;
  const JobOptions options = parse_job_options(argc, argv);
  const int rank = std::atoi(std::getenv("RANK"));
  const int size = std::atoi(std::getenv("WORLD_SIZE"));
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  store_options.isServer = rank == 0;
  store_options.numWorkers = size;
  auto store = c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), store_options);
  auto settings = c10d::ProcessGroupGloo::Options::create();
  settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, settings);
  const auto ranks = std::make_shared<libtorch::ProcessGroupRanks>(group, options.time_limit);
  Job job(ranks, options, [&](float* data, size_t count) {
    std::vector<torch::Tensor> tensors = {
        torch::from_blob(data, {static_cast<int64_t>(count)}, torch::kFloat)};
    try {
      group->allreduce(tensors)->wait(options.time_limit);
    } catch (const std::exception& error) {
      throw Error(ErrorCode::kRankLost, error.what());
    }
  });
  const int code = job.run();
  if (code == 0) {  // rank 0 hosts the store and has to exit last
    try {
      group->barrier()->wait();
    } catch (const std::exception&) {
    }
  }
  std::_Exit(code);  // the destructor of the group would wait for the other ranks
}
