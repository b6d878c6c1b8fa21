// The CUDA implementation of measure/.
#ifndef HEADROOM_SRC_MEASURE_CUDA_H_
#define HEADROOM_SRC_MEASURE_CUDA_H_

#include <headroom/ranges.h>

#include <memory>
#include <vector>

#include "core/cuda.h"
#include "measure/kernels.h"

namespace headroom::internal {

/// A tensor as kernels see it. The elements of a list are divided into pieces of equal size, each
/// within one tensor; a thread block processes one piece at a time.
struct CudaTensor {
  void* data;
  int64_t count;
  int64_t first_piece;  // index of its first piece in the whole list
  DType dtype;
  bool operator==(const CudaTensor&) const = default;
};

/// Reads lists of tensors on one CUDA device. The same list on the same model of device gives the
/// same bits. Device memory is allocated by the constructor, and by set_list() for a list that is
/// longer than all before. Everything else enqueues on the current stream and returns.
class CudaMeasure {
 public:
  explicit CudaMeasure(int device);
  int device() const { return device_; }

  /// Sets the tensors to read. Enqueues an upload of the table if it has changed.
  void set_list(const std::vector<TensorView>& list);

  /// Enqueues one read of the list, which also unscales if the job says so.
  void enqueue(const MeasureJob& job);

  /// Enqueues zeros for the whole list, unless `*keep` on the device is true by then.
  void enqueue_clear(const bool* keep);

  /// Result of the last read, on the device; wait() waits for it and copies it.
  GradStats* stats() const { return partials_.data() + blocks_; }
  GradStats wait() const;

 private:
  int device_;
  int blocks_;
  CudaArray<GradStats> partials_;  // of each block, then the total
  CudaArray<unsigned> finished_;   // number of blocks that have written their partial result
  CudaArray<CudaTensor> table_;
  CudaArray<uint32_t> owners_;       // index of the tensor of each piece
  std::vector<CudaTensor> tensors_;  // contents of table_
  int64_t pieces_ = 0;
  int64_t piece_bytes_ = 0;
  int64_t count_ = 0;
};

/// The rows of a RangeTable on one CUDA device (cuda_ranges.cu). The constructor allocates and
/// waits; everything else enqueues on the current stream and returns, except wait().
class CudaRanges {
 public:
  CudaRanges(int device, size_t rows);
  ~CudaRanges();
  CudaRanges(const CudaRanges&) = delete;
  CudaRanges& operator=(const CudaRanges&) = delete;

  void clear(size_t rows);
  void measure(const std::vector<TensorView>& tensors, size_t row);  // of the first one
  void copy_to_host(size_t rows);

  bool ready() const;
  void wait() const;
  RangeStats read(size_t row, int64_t count) const;  // once ready

 private:
  struct Event;
  int device_;
  CudaBuffer table_;
  CudaHostBuffer host_;
  std::vector<bool> is_f16_;  // by row
  std::unique_ptr<Event> copied_;
};

/// Adds counts by magnitude of tensors that are all on one CUDA device, and waits (cuda_detail.cu).
void cuda_detail(const std::vector<TensorView>& list, GradDetail* detail);

/// measure() and unscale_() for tensors that are all on one CUDA device; waits for the result.
/// `detail` may be null. GradStats::culprit is an index into `list`.
GradStats cuda_measure(const std::vector<TensorView>& list, const MeasureJob& job,
                       GradDetail* detail);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_CUDA_H_
