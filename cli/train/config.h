// cli/train/ is the trainer behind `headroom train` and `headroom compare`. A task (model and data)
// gives losses, run() trains it under a scaler, the commands print and draw what came out.
#ifndef HEADROOM_CLI_TRAIN_CONFIG_H_
#define HEADROOM_CLI_TRAIN_CONFIG_H_

#include <headroom/policy.h>
#include <torch/types.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom::cli {

enum class OptLevel : uint8_t {
  kO0,  // FP32
  kO1,  // FP32 parameters, 16-bit products (autocast)
  kO2,  // 16-bit parameters with FP32 masters; norms stay FP32
  kO3,  // 16-bit parameters, no masters
};

/// Stands for the model's own default, until resolve().
inline constexpr int64_t kDefaultCount = std::numeric_limits<int64_t>::min();
inline constexpr double kDefaultRate = std::numeric_limits<double>::lowest();

/// The part of every batch that this rank trains on.
struct Part {
  int64_t rank = 0;
  int64_t ranks = 1;

  torch::Tensor of(const torch::Tensor& batch) const {
    const int64_t count = batch.size(0) / ranks;
    return ranks == 1 ? batch : batch.narrow(0, rank * count, count);
  }
};

/// What the user asked for.
struct TrainConfig {
  std::string model = "field";
  std::string data;  // a file or folder of the user's; empty: built in
  std::string precision = "fp32";
  std::string opt_level;   // empty: O0 for fp32, O1 for the others
  std::string loss_scale;  // empty: dynamic for fp16, none for the others
  std::string optimizer;
  std::string fake_quant;
  std::string device = "cpu";
  std::string out;
  std::string schedule;
  double lr = kDefaultRate;
  std::optional<double> clip;  // none: gradients are not clipped
  int64_t steps = kDefaultCount;
  int64_t batch = kDefaultCount;
  int64_t accumulate = 1;
  int64_t width = kDefaultCount;
  int64_t depth = kDefaultCount;
  int64_t context = kDefaultCount;
  int64_t layers = kDefaultCount;  // look at every layer once in this many steps; 0: never
  uint64_t seed = 1;
  int threads = 0;
  bool tensorboard = false;
  bool watch = false;
  int port = 0;
  bool resume = false;
  int64_t checkpoint_every = kDefaultCount;  // steps; 0: never
  std::string inject;                        // faults, see headroom/inject.h
  uint64_t inject_seed = 0;
  std::string escape;      // the precision to go on in when scaling cannot help; empty: stop
  double timeout = 300.0;  // seconds to wait for other ranks
  Part part;

  torch::ScalarType dtype() const;
  OptLevel level() const;
  ScalePolicy policy() const;  // of loss_scale
  torch::Device torch_device() const { return torch::Device(device); }
};

/// Throws Error(kInvalidArgument) with a sentence if a setting cannot be used or settings
/// contradict each other; fills in the model's defaults.
void resolve(TrainConfig* config);

/// The same run in another precision, with nothing left that could collapse: no loss scale.
TrainConfig in_precision(TrainConfig config, const std::string& precision);

/// The settings of a run, each as its option and what one would write after it; of a config that
/// is resolved.
std::vector<std::pair<std::string, std::string>> settings_of(const TrainConfig& config);

/// Whether a run that goes on may have another value for this option.
bool may_change(const std::string& option);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_CONFIG_H_
