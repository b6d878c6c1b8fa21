// Ranks over c10d's Gloo, for torchrun and other launchers that set its environment variables.
#include <headroom/error.h>
#include <headroom/libtorch/ranks.h>
#include <torch/torch.h>

#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "cli/train/ranks.h"

namespace headroom::cli {
namespace {

using c10d::ProcessGroupGloo;

[[noreturn]] void lost(const char* what, const std::exception& error) {
  std::string why = error.what();
  why = why.substr(0, why.find('\n'));
  if (!why.empty() && why.back() == '.') why.pop_back();
  throw Error(ErrorCode::kRankLost, std::string("Another rank did not reach ") + what + " (" + why +
                                        "); it has ended or is stuck. Look at its output, and "
                                        "start again.");
}

class GlooTeam : public Team {
 public:
  GlooTeam(const Launch& launch, std::chrono::milliseconds time_limit) : time_limit_(time_limit) {
    try {
      c10d::TCPStoreOptions where;
      // torchrun's own store listens at MASTER_PORT and may be of another version than this
      // LibTorch, so use the next port.
      const bool agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE") != nullptr;
      where.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")) + agent);
      where.isServer = launch.first();
      where.numWorkers = launch.size;
      where.timeout = time_limit;
      store_ = c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), where);
      auto options = ProcessGroupGloo::Options::create();
      options->timeout = time_limit;
      const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
      options->devices.push_back(interface != nullptr
                                     ? ProcessGroupGloo::createDeviceForInterface(interface)
                                     : ProcessGroupGloo::createDefaultDevice());
      group_ = c10::make_intrusive<ProcessGroupGloo>(
          c10::make_intrusive<c10d::PrefixStore>("headroom", store_), launch.rank, launch.size,
          options);
    } catch (const std::exception& error) {
      lost("the start of the job", error);
    }
    ranks_ = std::make_shared<libtorch::ProcessGroupRanks>(group_, time_limit);
  }

  ~GlooTeam() override {
    try {  // rank 0 hosts the store and must not leave before the others
      group_->barrier()->wait(time_limit_);
    } catch (const std::exception&) {
    }
  }

  void abort(int code) override { std::_Exit(code); }

 protected:
  void all_reduce_sum(float* data, int64_t count) override {
    std::vector<torch::Tensor> flat = {torch::from_blob(data, {count}, torch::kFloat)};
    try {
      group_->allreduce(flat)->wait(time_limit_);
    } catch (const std::exception& error) {
      lost("the averaging of the gradients", error);
    }
  }

 private:
  std::chrono::milliseconds time_limit_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
  c10::intrusive_ptr<ProcessGroupGloo> group_;
};

}  // namespace

std::unique_ptr<Team> make_gloo_team(const Launch& launch, std::chrono::milliseconds time_limit) {
  return std::make_unique<GlooTeam>(launch, time_limit);
}

}  // namespace headroom::cli
