// What the stations need of CUDA. In a build without it the same symbols are there (cuda_none.cc):
// built_with_cuda() says no, and everything else throws.
#ifndef HEADROOM_SRC_CORE_CUDA_H_
#define HEADROOM_SRC_CORE_CUDA_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace headroom::internal {

HEADROOM_API bool built_with_cuda();

/// What an address points to, as far as CUDA knows.
enum class MemoryKind : uint8_t {
  kUnknown,   // CUDA is not in use in this process, or not in this build
  kPageable,  // ordinary host memory
  kPinned,    // host memory of cudaHostAlloc or cudaHostRegister
  kManaged,
  kDevice,
};

struct MemoryPlace {
  MemoryKind kind = MemoryKind::kUnknown;
  int device = 0;  // of kDevice
};

/// Where the memory of a view with elements is. Takes a fraction of a microsecond. For a view on
/// the CPU it neither loads nor initialises CUDA.
MemoryPlace memory_place(const TensorView& view);

/// Whether kernels on this device can use ordinary host memory (HMM, Grace).
bool reads_pageable_memory(int device);

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

/// An array on a CUDA device that grows.
template <typename T>
class CudaArray {
 public:
  /// Makes room; what was there is lost if there was too little.
  void reserve(int device, size_t count) {
    if (count <= room_) return;
    const size_t room = count > 2 * room_ ? count : 2 * room_;
    room_ = 0;
    memory_ = {};
    memory_ = CudaBuffer(device, room * sizeof(T));
    room_ = room;
  }
  T* data() const { return static_cast<T*>(memory_.data()); }

 private:
  CudaBuffer memory_;
  size_t room_ = 0;
};

struct CudaFreeHost {
  void operator()(void* data) const;
};

/// Zeroed host memory that kernels write to and the host reads at any time.
class CudaHostBuffer {
 public:
  explicit CudaHostBuffer(size_t bytes);
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }

 private:
  std::unique_ptr<void, CudaFreeHost> data_;
};

/// Copies between any two places, host or device, after all work in the current stream of `device`,
/// and waits.
HEADROOM_API void cuda_copy(int device, void* to, const void* from, size_t bytes);

/// Enqueues a copy from host to device. The bytes travel with the launch: the host memory may
/// change at once, nothing waits, and a CUDA graph keeps them.
void cuda_upload(void* to, const void* from, size_t bytes);

/// Waits for the current stream of `device`. The device matters even if the stream is the default
/// one, of which each device has its own.
void cuda_wait(int device);

/// The same for memory that is initialised outside of a step: whatever stream steps next finds it.
/// Does nothing while the stream is captured, where a wait is impossible and the graph keeps the
/// order.
void cuda_settle(int device);

/// Enqueues zeros for the whole view.
void cuda_zero(const TensorView& view);

/// convert() of views on one device; enqueues.
void cuda_convert(const TensorView& from, const TensorView& to);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CUDA_H_
