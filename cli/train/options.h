#ifndef HEADROOM_CLI_TRAIN_OPTIONS_H_
#define HEADROOM_CLI_TRAIN_OPTIONS_H_

#include <CLI/CLI.hpp>

#include "cli/train/config.h"

namespace headroom::cli {

/// The options that `train` and `compare` share.
void add_training_options(CLI::App& command, TrainConfig* config);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_OPTIONS_H_
