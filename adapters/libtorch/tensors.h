// adapters/libtorch/ stands between torch tensors and the core's views of memory. This header has
// the gradients: whatever their strides or layout, as views the core can read and write.
#ifndef HEADROOM_ADAPTERS_LIBTORCH_TENSORS_H_
#define HEADROOM_ADAPTERS_LIBTORCH_TENSORS_H_

#include <headroom/libtorch/module.h>
#include <headroom/runtime.h>
#include <headroom/tensor.h>
#include <torch/types.h>

#include <string>
#include <vector>

namespace headroom::libtorch::internal {

/// Throws Error(kInvalidArgument) if the storage is smaller than the tensor: it was cut, or given
/// back.
void check_storage(const torch::Tensor& tensor, const char* what, const std::string& name);

/// LibTorch's current CUDA device; 0 if there is none.
int current_cuda_device();

/// Where the core finds a torch device. As everywhere in torch, "cuda" without an index is the
/// current device, which the caller passes.
Device core_device(const torch::Device& device, int current);

/// The cudaStream_t that is LibTorch's current one on this device, which has one for each device.
/// Null (the default stream) in builds without CUDA.
void* torch_stream_of(int device);

/// As long as it lives, the core's work on CUDA tensors goes to LibTorch's current stream of the
/// tensors' device, whatever device is the current one.
class TorchStream {
 public:
  TorchStream();

 private:
  StreamScope scope_;
};

/// True if the tensor's elements fill one block of memory, in any order.
bool is_dense(const torch::Tensor& tensor);

/// What decides whether a view of a tensor is still right.
struct Place {
  const void* data = nullptr;
  int64_t count = -1;
  size_t storage_bytes = 0;
  torch::ScalarType type = torch::kFloat;

  Place() = default;
  explicit Place(const torch::Tensor& tensor);
  bool operator==(const Place&) const = default;
};

/// The gradients of some parameters as views. A gradient whose memory is where it was keeps its
/// view. Those that are not dense are staged: copied to dense memory, and back by write_back().
class Gradients {
 public:
  enum class Order {
    kAny,       // each gradient in the order of its own strides; sparse ones as their values
    kAsWeight,  // in the order of the parameter's strides
  };

  /// Looks at the gradient of parameter `index`, which may be undefined. Returns whether its view
  /// has changed. The gradient is held until release().
  bool look(size_t index, const torch::Tensor& parameter, Order order, const std::string& name);

  const TensorView& view(size_t index) const { return views_[index]; }

  /// To be called after the core has changed gradients.
  void write_back();

  /// Lets go of all gradients, so that torch can free them. Views stay, to be compared.
  void release();

  /// Forgets all views.
  void clear();

 private:
  struct Staged {
    torch::Tensor parameter;
    torch::Tensor grad;
    torch::Tensor memory;
  };
  torch::Tensor stage(const torch::Tensor& parameter, const torch::Tensor& grad,
                      torch::Tensor memory);
  torch::Tensor dense(const torch::Tensor& parameter, Order order, const std::string& name);

  std::vector<Place> places_;
  std::vector<TensorView> views_;
  std::vector<torch::Tensor> held_;
  std::vector<Staged> staged_;
};

}  // namespace headroom::libtorch::internal

#endif  // HEADROOM_ADAPTERS_LIBTORCH_TENSORS_H_
