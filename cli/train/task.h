#ifndef HEADROOM_CLI_TRAIN_TASK_H_
#define HEADROOM_CLI_TRAIN_TASK_H_

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/train/config.h"

namespace headroom::cli {

/// How good a trained model is, on data of its own.
struct Score {
  double loss = 0.0;
  double metric = 0.0;
};

/// A picture as numbers: rows of pixels, one channel (shown in colours of a scale) or three.
struct Picture {
  int64_t height = 0;
  int64_t width = 0;
  int64_t channels = 1;
  std::vector<float> values;
};

/// A model with its data. Everything random comes from the config's seed, and data never depends on
/// the precision: the same seed gives the same batches in every run.
class Task {
 public:
  virtual ~Task() = default;

  virtual torch::nn::Module& model() = 0;

  /// A batch is given in slices, small enough for the caches; their losses add up to the batch's.
  virtual int64_t slices() const { return 1; }

  /// Moves on to the next batch.
  virtual void next_batch() = 0;

  /// The FP32 loss of a slice of the present batch.
  virtual torch::Tensor loss(int64_t slice) = 0;

  /// Where the data's random generator stands. Throws Error(kBadState) for a text that is none.
  virtual std::string data_position() const = 0;
  virtual void set_data_position(const std::string& text) = 0;

  virtual Score score() = 0;
  virtual std::string metric_name() const = 0;  // "R2", "PSNR", "accuracy", ...

  /// What the model learned and what it should have, if that can be looked at.
  virtual Picture target() { return {}; }
  virtual Picture result() { return {}; }
};

/// Throws Error(kInvalidArgument) if the user's data cannot be used.
std::unique_ptr<Task> make_task(const TrainConfig& config);

std::unique_ptr<Task> make_field(const TrainConfig& config);
std::unique_ptr<Task> make_lm(const TrainConfig& config);
std::unique_ptr<Task> make_images(const TrainConfig& config);  // mlp and cnn
std::unique_ptr<Task> make_gpt(const TrainConfig& config);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_TASK_H_
