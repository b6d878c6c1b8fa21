// The user's files, and data that is made up where there are none.
#ifndef HEADROOM_CLI_TRAIN_DATA_H_
#define HEADROOM_CLI_TRAIN_DATA_H_

#include <torch/types.h>

#include <string>

namespace headroom::cli {

/// The whole file. Throws Error(kInvalidArgument) if it cannot be read or is empty.
std::string read_text(const std::string& path);

/// English-like sentences of a small grammar, always the same.
std::string made_up_text(size_t bytes);

struct ImageSet {
  torch::Tensor images;  // N x 1 x height x width, from 0 to 1
  torch::Tensor labels;  // N, from 0 to 9
};

struct ImageData {
  ImageSet train;
  ImageSet test;
};

/// The four IDX files of MNIST and its kin, from one folder.
ImageData read_idx_folder(const std::string& folder);

/// Digits drawn at random places, sizes and angles, with noise; always the same ones.
ImageData made_up_digits();

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_DATA_H_
