// The CUDA side of measure/.
#ifndef HEADROOM_SRC_MEASURE_CUDA_H_
#define HEADROOM_SRC_MEASURE_CUDA_H_

#include <vector>

#include "core/cuda.h"
#include "measure/kernels.h"

namespace headroom::internal {

/// A tensor, and where it begins in the list of pieces that blocks take.
struct CudaTensor {
  void* data;
  int64_t count;
  int64_t first_piece;
  DType dtype;
  bool operator==(const CudaTensor&) const = default;
};

/// Reads lists of tensors on one CUDA device. The same list on the same kind of device gives the
/// same bits. Memory is taken by the constructor, and when a list is longer than all before.
class CudaMeasure {
 public:
  explicit CudaMeasure(int device);
  int device() const { return device_; }

  /// The tensors to read from now on. Enqueues their table if it is not there already.
  void set_list(const std::vector<TensorView>& list);

  /// Elements in the list.
  int64_t count() const { return count_; }

  /// Enqueues one read of the list, which also unscales if the job says so; with `factor`, by that
  /// number on the device.
  void enqueue(const MeasureJob& job, const float* factor = nullptr);

  /// Enqueues a multiplication by a number on the device; if that is 1, nothing is touched.
  void enqueue_rescale(const float* factor);

  /// Enqueues zeros for the whole list, unless `*keep` on the device is true then.
  void enqueue_clear(const bool* keep);

  /// What the last read found: on the device, or here after waiting.
  GradStats* stats() const;
  GradStats wait() const;

 private:
  void launch(const MeasureJob& job, const float* factor, bool idle_at_one);

  int device_;
  int blocks_;
  CudaArray<GradStats> partials_;  // of the blocks, then of all
  CudaArray<unsigned> finished_;
  CudaArray<CudaTensor> table_;
  CudaArray<uint32_t> owners_;       // the tensor of each piece
  std::vector<CudaTensor> tensors_;  // in the table
  int64_t pieces_ = 0;
  int64_t piece_bytes_ = 0;
  int64_t count_ = 0;
};

/// Adds counts by magnitude of tensors that are all on one CUDA device, and waits (cuda_detail.cu).
void cuda_detail(const std::vector<TensorView>& list, GradDetail* detail);

/// Measures, and unscales if the job says so, tensors that are all on one CUDA device, and waits
/// for the result. Its culprit is an index into `list`; `detail` may be null.
GradStats cuda_measure(const std::vector<TensorView>& list, const MeasureJob& job,
                       GradDetail* detail);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_CUDA_H_
