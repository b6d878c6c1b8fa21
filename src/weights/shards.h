// weights/ decides whether a checkpoint is safe in FP16. It uses files/ and inspect/, and must not
// know about training.
//
// This header finds the files of a checkpoint.
#ifndef HEADROOM_SRC_WEIGHTS_SHARDS_H_
#define HEADROOM_SRC_WEIGHTS_SHARDS_H_

#include <map>
#include <string>
#include <vector>

namespace headroom::internal {

/// A safetensors file, and the tensors that an index promises to be in it.
struct Shard {
  std::string path;
  std::vector<std::string> promised;
};

/// The files of a path: itself, the shards of an index, or the files of a folder.
std::vector<Shard> shards_of(const std::string& path);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_WEIGHTS_SHARDS_H_
