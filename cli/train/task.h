// The interface between the training loop and the models.
#ifndef HEADROOM_CLI_TRAIN_TASK_H_
#define HEADROOM_CLI_TRAIN_TASK_H_

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/train/config.h"

namespace headroom::cli {

/// The quality of a trained model on test data.
struct Score {
  double loss = 0.0;
  double metric = 0.0;
};

/// Rows of pixels with one channel (plotted with a colour map) or three.
struct Picture {
  int64_t height = 0;
  int64_t width = 0;
  int64_t channels = 1;
  std::vector<float> values;
};

/// A model and its data. All randomness comes from the config's seed and is independent of the
/// precision: the same seed gives the same batches in every run.
class Task {
 public:
  virtual ~Task() = default;

  virtual torch::nn::Module& model() = 0;

  /// A batch is processed in slices that fit the caches; the sum of their losses is the batch's
  /// loss.
  virtual int64_t slices() const { return 1; }

  /// Advances to the next batch.
  virtual void next_batch() = 0;

  /// The FP32 loss of a slice of the current batch.
  virtual torch::Tensor loss(int64_t slice) = 0;

  /// The state of the data's random generator, as text for checkpoints and retries. Setting an
  /// invalid state throws Error(kBadState).
  virtual std::string data_position() const = 0;
  virtual void set_data_position(const std::string& text) = 0;

  virtual Score score() = 0;
  virtual std::string metric_name() const = 0;  // "R2", "PSNR", "accuracy", ...

  /// The target and the model's output as pictures, if the task has them.
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
