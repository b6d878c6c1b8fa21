// The states of random generators, as text for checkpoints.
#ifndef HEADROOM_CLI_TRAIN_RANDOM_STATE_H_
#define HEADROOM_CLI_TRAIN_RANDOM_STATE_H_

#include <torch/torch.h>

#include <random>
#include <string>

namespace headroom::cli {

std::string random_state(const torch::Generator& generator);
std::string random_state(const std::mt19937_64& generator);

/// Throw Error(kBadState) and leave the generator unchanged if the text is not a valid state.
void set_random_state(torch::Generator& generator, const std::string& text);
void set_random_state(std::mt19937_64& generator, const std::string& text);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_RANDOM_STATE_H_
