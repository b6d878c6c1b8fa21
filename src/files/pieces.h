// Reads the tensors of a file on all threads.
#ifndef HEADROOM_SRC_FILES_PIECES_H_
#define HEADROOM_SRC_FILES_PIECES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "files/tensor_file.h"

namespace headroom::files {

/// Cuts the tensors into pieces of 16 MiB (a packed tensor is one piece) and calls work(tensor,
/// first, count) for each, from several threads; `tensor` is an index. If a call throws, no further
/// one begins, and the first exception is rethrown.
void for_each_piece(const std::vector<const Tensor*>& tensors,
                    const std::function<void(size_t tensor, int64_t first, int64_t count)>& work);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_PIECES_H_
