// Training data from files, and synthetic data.
#ifndef HEADROOM_CLI_TRAIN_DATA_H_
#define HEADROOM_CLI_TRAIN_DATA_H_

#include <torch/types.h>

#include <string>

namespace headroom::cli {

/// The whole file. Throws Error(kInvalidArgument) if it cannot be read or is empty.
std::string read_text(const std::string& path);

/// English-like sentences of a small grammar. Deterministic.
std::string synthetic_text(size_t bytes);

struct ImageSet {
  torch::Tensor images;  // N x 1 x height x width, from 0 to 1
  torch::Tensor labels;  // N, from 0 to 9
};

struct ImageData {
  ImageSet train;
  ImageSet test;
};

/// Reads the four IDX files of MNIST or a data set in the same format from a folder.
ImageData read_idx_folder(const std::string& folder);

/// Digits drawn at random positions, sizes and angles, with noise. Deterministic.
ImageData synthetic_digits();

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_DATA_H_
