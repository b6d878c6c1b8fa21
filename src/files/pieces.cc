#include "files/pieces.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "core/parallel.h"

namespace headroom::files {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 24;

struct Piece {
  size_t tensor;
  int64_t first;
  int64_t count;
};

}  // namespace

void for_each_piece(const std::vector<const Tensor*>& tensors,
                    const std::function<void(size_t, int64_t, int64_t)>& work) {
  std::vector<Piece> pieces;
  size_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = *tensors[i];
    const int64_t step =
        tensor.packed ? tensor.count : kPieceBytes / static_cast<int64_t>(size_of(tensor.dtype));
    for (int64_t first = 0; first < tensor.count; first += step) {
      pieces.push_back({i, first, std::min(step, tensor.count - first)});
    }
    bytes += static_cast<size_t>(tensor.count) * size_of(tensor.dtype);
  }
  std::mutex mutex;
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  internal::parallel_for(pieces.size(), bytes, [&](size_t i) {
    if (failed) return;
    try {
      work(pieces[i].tensor, pieces[i].first, pieces[i].count);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      failed = true;
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace headroom::files
