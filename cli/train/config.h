// cli/train/: the trainer behind `headroom train` and `headroom compare`. A Task (a model and its
// data) computes losses, run() trains it with a GradScaler, and the commands print and plot the
// result.
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

/// Placeholders that resolve() replaces by the model's defaults.
inline constexpr int64_t kDefaultCount = std::numeric_limits<int64_t>::min();
inline constexpr double kDefaultRate = std::numeric_limits<double>::lowest();

/// The slice of every batch that this rank trains on.
struct Part {
  int64_t rank = 0;
  int64_t ranks = 1;

  torch::Tensor of(const torch::Tensor& batch) const {
    const int64_t count = batch.size(0) / ranks;
    return ranks == 1 ? batch : batch.narrow(0, rank * count, count);
  }
};

/// All settings of a training run.
struct TrainConfig {
  std::string model = "field";
  std::string data;  // path of a file or folder; empty: built-in data
  std::string precision = "fp16";
  std::string opt_level;   // empty: O0 for fp32, otherwise O1
  std::string loss_scale;  // empty: headroom for fp16, otherwise none
  std::string optimizer;
  std::string state = "full";  // of the optimizer, see StateFormat
  std::string fake_quant;
  std::string device = "cpu";
  std::string out;
  std::string schedule;
  double lr = kDefaultRate;
  std::optional<double> clip;  // gradient norm; empty: no clipping
  int64_t steps = kDefaultCount;
  int64_t batch = kDefaultCount;
  int64_t accumulate = 1;
  int64_t width = kDefaultCount;
  int64_t depth = kDefaultCount;
  int64_t context = kDefaultCount;
  int64_t layers = kDefaultCount;  // steps between snapshots of the layers; 0: none
  uint64_t seed = 1;
  int threads = 0;
  bool tensorboard = false;
  bool watch = false;
  int port = 0;
  bool resume = false;
  int64_t checkpoint_every = kDefaultCount;  // steps; 0: none
  std::string inject;                        // faults, see headroom/inject.h
  uint64_t inject_seed = 0;
  std::string escape;      // precision to switch to when no scale helps; empty: stop
  double timeout = 300.0;  // seconds to wait for other ranks
  Part part;

  torch::ScalarType dtype() const;
  OptLevel level() const;
  ScalePolicy policy() const;  // of loss_scale
  torch::Device torch_device() const { return torch::Device(device); }
};

/// Fills in the model's defaults and validates the settings. Throws Error(kInvalidArgument) if a
/// setting is invalid or settings contradict each other.
void resolve(TrainConfig* config);

/// The same run in another precision, without a loss scale. Resolved.
TrainConfig in_precision(TrainConfig config, const std::string& precision);

/// The settings of a resolved config as pairs of option and value, in the form of the command line.
std::vector<std::pair<std::string, std::string>> settings_of(const TrainConfig& config);

/// Whether a resumed run may have another value for this option.
bool may_change_on_resume(const std::string& option);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_CONFIG_H_
