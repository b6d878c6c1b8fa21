// What the stations need of CUDA. In a build without it the same symbols are there (cuda_none.cc):
// built_with_cuda() says no, and everything else throws.
#ifndef HEADROOM_SRC_CORE_CUDA_H_
#define HEADROOM_SRC_CORE_CUDA_H_

#include <headroom/tensor.h>

#include <cstddef>
#include <memory>

namespace headroom::internal {

bool built_with_cuda();

struct CudaFree {
  void operator()(void* data) const;
};

/// Zeroed memory on a CUDA device.
class CudaBuffer {
 public:
  CudaBuffer() = default;
  CudaBuffer(int device, size_t bytes);
  void* data() const { return data_.get(); }

 private:
  std::unique_ptr<void, CudaFree> data_;
};

/// Copies between any two places, host or device, after all work in the current stream, and waits.
void cuda_copy(void* to, const void* from, size_t bytes);

/// Enqueues zeros for the whole view.
void cuda_zero(const TensorView& view);

/// convert() of views on one device; enqueues.
void cuda_convert(const TensorView& from, const TensorView& to);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CUDA_H_
