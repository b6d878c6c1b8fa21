// CUDA memory, copies and waits for the other modules. Builds without CUDA link cuda_none.cc
// instead of the .cu files: it has the same symbols, built_with_cuda() returns false, and
// everything that needs a device throws.
//
// Functions whose comment says "enqueues" put work on the current stream (StreamScope) and return.
#ifndef HEADROOM_SRC_CORE_CUDA_H_
#define HEADROOM_SRC_CORE_CUDA_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace headroom::internal {

HEADROOM_API bool built_with_cuda();

/// The cudaStream_t of this thread's innermost StreamScope for work on `device`; null, CUDA's
/// default stream, outside of any scope (stream.cc).
void* stream_on(int device);

/// What an address points to, according to CUDA.
enum class MemoryKind : uint8_t {
  kUnknown,   // this process does not use CUDA, or this build has none
  kPageable,  // ordinary host memory
  kPinned,    // host memory of cudaHostAlloc or cudaHostRegister
  kManaged,
  kDevice,
};

struct MemoryPlace {
  MemoryKind kind = MemoryKind::kUnknown;
  int device = 0;  // except for kPageable and kUnknown
};

/// Whether this process has loaded CUDA's driver. If not, all its memory is host memory.
bool cuda_loaded();

/// Where the memory of a view with elements is. Takes a fraction of a microsecond. For a view on
/// the CPU it neither loads nor initialises CUDA.
MemoryPlace memory_place(const TensorView& view);

/// Whether kernels on this device can access ordinary host memory (HMM, Grace).
bool reads_pageable_memory(int device);

/// Throws Error(kWrongOrder) if the current stream of `device` is captured: memory that is
/// allocated and initialised there would be initialised again by every replay.
void cuda_refuse_capture(int device);

struct CudaFree {
  void operator()(void* data) const;
};

/// Owns zeroed memory on a CUDA device. Allocation waits for the current stream and throws
/// Error(kWrongOrder) while a CUDA graph is captured.
class CudaBuffer {
 public:
  CudaBuffer() = default;
  CudaBuffer(int device, size_t bytes);
  void* data() const { return data_.get(); }

 private:
  std::unique_ptr<void, CudaFree> data_;
};

/// A growing array on a CUDA device.
template <typename T>
class CudaArray {
 public:
  /// Makes room for `count` elements. If that takes new memory, the contents are lost. Capacity at
  /// least doubles, so that slowly growing lists do not allocate in every step.
  void reserve(int device, size_t count) {
    if (count <= room_) return;
    cuda_refuse_capture(device);  // freeing memory would end the capture
    const size_t room = count > 2 * room_ ? count : 2 * room_;
    room_ = 0;
    memory_ = {};  // freed first: both at once may not fit
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

/// Owns zeroed, pinned host memory, which kernels write to and the host reads without a copy.
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

/// Copies between host and device memory in either direction, after all work in the current stream
/// of `device`, and waits for the copy.
HEADROOM_API void cuda_copy(int device, void* to, const void* from, size_t bytes);

/// Enqueues a copy from host to device. The bytes are passed as kernel arguments: the host memory
/// may change as soon as this returns, and a captured CUDA graph keeps its own copy. `to` must have
/// room for a multiple of 8 bytes.
void cuda_upload(void* to, const void* from, size_t bytes);

/// Waits for the current stream of `device`. Every device has a default stream of its own, so the
/// device matters even if no stream was set.
void cuda_wait(int device);

/// cuda_wait() after memory was initialised outside of a step, so that a later step on any stream
/// sees it. Does nothing while the stream is captured: waiting is impossible there, and the graph
/// keeps the order.
void cuda_settle(int device);

/// The version of the virtual architecture whose code a device runs, such as 75 or 90. It is that
/// of all kernels, because all are compiled for the same architectures. The code may be older than
/// the device, which then compiles it from PTX.
int cuda_code_version(int device);

/// Enqueues zeros.
void cuda_zero(int device, void* data, size_t bytes);

/// cuda_copy() if `device` is a CUDA device, else a copy in host memory.
inline void copy_memory(const Device& device, void* to, const void* from, size_t bytes) {
  if (device.type == DeviceType::kCUDA) return cuda_copy(device.index, to, from, bytes);
  std::memmove(to, from, bytes);
}

/// Zeros in memory of a device. Enqueues on CUDA devices.
inline void zero_memory(const Device& device, void* data, size_t bytes) {
  if (device.type == DeviceType::kCUDA) return cuda_zero(device.index, data, bytes);
  std::memset(data, 0, bytes);
}

/// convert() between views on the same device; enqueues.
void cuda_convert(const TensorView& from, const TensorView& to);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_CUDA_H_
