// adapters/libtorch converts between torch tensors and optimizers and the core's views of memory.
// It decides no rule of training.
//
// This header converts gradients, whatever their strides or layout, to views that the core can read
// and write, and selects LibTorch's current CUDA stream for the core.
#ifndef HEADROOM_ADAPTERS_LIBTORCH_TENSORS_H_
#define HEADROOM_ADAPTERS_LIBTORCH_TENSORS_H_

#include <headroom/libtorch/module.h>
#include <headroom/runtime.h>
#include <headroom/tensor.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

namespace headroom::libtorch::internal {

/// Throws Error(kUnsupported).
[[noreturn]] void unsupported(const std::string& message);

bool is_sixteen_bit(torch::ScalarType type);

/// Throws Error(kInvalidArgument) if the storage has been freed or shrunk below the tensor's size.
void check_storage(const torch::Tensor& tensor, const char* what, const std::string& name);

/// LibTorch's current CUDA device; 0 if there is none.
int current_cuda_device();

/// A torch device as the core's. As everywhere in torch, "cuda" without an index is the current
/// device, which the caller passes.
Device core_device(const torch::Device& device, int current);

/// Memory from torch's allocator, as a StateAllocator of the core.
std::shared_ptr<void> torch_memory(size_t bytes, const Device& device);

/// LibTorch's current cudaStream_t on this device. Null (the default stream) in builds without
/// CUDA.
void* torch_stream_of(int device);

/// During its lifetime the core enqueues work on LibTorch's current stream of each tensor's device,
/// whichever device is the current one.
class TorchStream {
 public:
  TorchStream();

 private:
  StreamScope scope_;
};

/// Whether the tensor's elements fill one block of memory, in any order, and are stored as they are
/// (no lazy conjugation or negation).
bool is_dense(const torch::Tensor& tensor);

/// Identifies a tensor's memory: while it is equal, a view made earlier is still valid.
struct Place {
  const void* data = nullptr;
  int64_t count = -1;
  size_t storage_bytes = 0;
  torch::ScalarType type = torch::kFloat;

  Place() = default;
  explicit Place(const torch::Tensor& tensor);
  bool operator==(const Place&) const = default;
};

/// Views of the gradients of a list of parameters. A gradient whose memory has not moved keeps its
/// view. A gradient that is not dense is staged: copied to dense memory, and back by write_back().
class Gradients {
 public:
  enum class Order {
    kAny,       // elements in the order of the gradient's own strides; of sparse ones the values
    kAsWeight,  // elements in the order of the parameter's strides
  };

  /// Updates the view of the gradient of parameter `index`, which may be undefined. Returns whether
  /// the view has changed. Keeps the gradient alive until release(). `name` is used in errors:
  /// Error(kMismatch) if the sizes differ, Error(kUnsupported) for other layouts and types.
  bool update(size_t index, const torch::Tensor& parameter, Order order, const std::string& name);

  const TensorView& view(size_t index) const { return views_[index]; }

  /// Copies staged gradients back and increments torch's version counters. Call this after the core
  /// has written to gradients.
  void write_back();

  /// Drops the references to gradients, so that torch can free them. Views are kept, so that
  /// update() can compare them.
  void release();

  /// release(), and drops all views.
  void clear();

 private:
  struct Staged {
    torch::Tensor parameter;
    torch::Tensor grad;
    torch::Tensor memory;  // the dense copy
  };
  torch::Tensor stage(const torch::Tensor& parameter, const torch::Tensor& grad,
                      torch::Tensor memory);
  torch::Tensor make_dense(const torch::Tensor& parameter, Order order, const std::string& name);

  std::vector<Place> places_;
  std::vector<TensorView> views_;
  std::vector<torch::Tensor> held_;  // until release()
  std::vector<Staged> staged_;
};

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_TENSORS_H_
