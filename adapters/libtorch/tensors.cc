// Views of torch tensors, and dense copies of gradients that cannot be viewed.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <headroom/error.h>

#include <map>
#include <sstream>

#ifdef HEADROOM_TORCH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace headroom::libtorch {
namespace internal {
namespace {

// Sums duplicates in FP32: partial sums of FP16 could overflow although the total does not.
torch::Tensor coalesced(const torch::Tensor& sparse) {
  if (sparse.is_coalesced()) return sparse;
  if (!is_sixteen_bit(sparse.scalar_type())) return sparse.coalesce();
  return sparse.to(torch::kFloat).coalesce().to(sparse.scalar_type()).coalesce();
}

// The core reads a complex number as two real ones.
torch::Tensor as_real(const torch::Tensor& tensor) {
  return tensor.is_complex() ? torch::view_as_real(tensor) : tensor;
}

// Strides of dimensions of size 1 do not affect the order of elements.
bool same_order(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Refuses gradients that were resized in place, or whose storage was.
void check_gradient(const torch::Tensor& parameter, const torch::Tensor& grad,
                    const std::string& name) {
  if (grad.sizes() != parameter.sizes()) {
    std::ostringstream message;
    message << name << " has size " << parameter.sizes() << " and a gradient of size "
            << grad.sizes() << "; they must be equal.";
    throw Error(ErrorCode::kMismatch, message.str());
  }
  check_storage(grad, "gradient", name);
}

}  // namespace

void unsupported(const std::string& message) { throw Error(ErrorCode::kUnsupported, message); }

bool is_sixteen_bit(torch::ScalarType type) {
  return type == torch::kHalf || type == torch::kBFloat16;
}

void check_storage(const torch::Tensor& tensor, const char* what, const std::string& name) {
  if (tensor.layout() != torch::kStrided || tensor.numel() == 0) return;
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), static_cast<size_t>(tensor.element_size()),
      static_cast<size_t>(tensor.storage_offset()));
  if (tensor.storage().nbytes() >= needed) return;
  throw Error(ErrorCode::kInvalidArgument,
              std::string("The ") + what + " of " + name + " needs " + std::to_string(needed) +
                  " bytes and its storage has " + std::to_string(tensor.storage().nbytes()) +
                  "; it was freed, shrunk, or loaded from a file of another type. Run backward or "
                  "load again.");
}

std::shared_ptr<void> torch_memory(size_t bytes, const Device& device) {
  const torch::Device where = device.type == DeviceType::kCUDA
                                  ? torch::Device(torch::kCUDA, static_cast<int8_t>(device.index))
                                  : torch::Device(torch::kCPU);
  const torch::Tensor memory =
      torch::empty({static_cast<int64_t>(bytes)}, torch::TensorOptions(torch::kByte).device(where));
  return {memory.data_ptr(), [memory](void*) {}};
}

int current_cuda_device() {
#ifdef HEADROOM_TORCH_CUDA
  if (c10::cuda::device_count() > 0) return static_cast<int>(c10::cuda::current_device());
#endif
  return 0;
}

Device core_device(const torch::Device& device, int current) {
  if (!device.is_cuda()) return {};
  return {DeviceType::kCUDA, device.has_index() ? static_cast<int>(device.index()) : current};
}

void* torch_stream_of([[maybe_unused]] int device) {
#ifdef HEADROOM_TORCH_CUDA
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
#else
  return nullptr;
#endif
}

TorchStream::TorchStream() : scope_(Stream(&torch_stream_of)) {}

bool is_dense(const torch::Tensor& tensor) {
  return tensor.layout() == torch::kStrided && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_conj() && !tensor.is_neg();
}

Place::Place(const torch::Tensor& tensor)
    : data(tensor.data_ptr()),
      count(tensor.numel()),
      storage_bytes(tensor.storage().nbytes()),
      type(tensor.scalar_type()) {}

void Gradients::release() {
  held_.clear();
  staged_.clear();
}

void Gradients::clear() {
  release();
  places_.clear();
  views_.clear();
}

torch::Tensor Gradients::stage(const torch::Tensor& parameter, const torch::Tensor& grad,
                               torch::Tensor memory) {
  staged_.push_back({parameter, grad, memory});
  return memory;
}

// A dense tensor with the values of a gradient that is sparse, or not dense in the wanted order.
torch::Tensor Gradients::make_dense(const torch::Tensor& parameter, Order order,
                                    const std::string& name) {
  const torch::Tensor grad = parameter.grad();
  // The core reads the values of a coalesced gradient in place. The parameter gets it as its
  // gradient, so that torch's optimizer sees the unscaled values.
  if (grad.layout() == torch::kSparse && order == Order::kAny) {
    const torch::Tensor sums = coalesced(grad);
    if (!sums.is_same(grad)) parameter.mutable_grad() = sums;
    const torch::Tensor values = sums._values();
    return is_dense(values) ? values : stage({}, values, values.contiguous());
  }
  if (grad.layout() == torch::kSparse) {  // a fused optimizer needs all elements
    const torch::Tensor full = coalesced(grad).to_dense();
    return stage(parameter, grad, torch::empty_like(parameter).copy_(full));
  }
  if (grad.layout() != torch::kStrided) {
    unsupported("The gradient of " + name +
                " is neither strided nor sparse COO; convert it first.");
  }
  if (order == Order::kAny) {
    return stage(parameter, grad,
                 grad.resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous));
  }
  return stage(parameter, grad,
               torch::empty_like(parameter, parameter.options().dtype(grad.dtype())).copy_(grad));
}

bool Gradients::update(size_t index, const torch::Tensor& parameter, Order order,
                       const std::string& name) {
  if (index >= places_.size()) {
    places_.resize(index + 1);
    views_.resize(index + 1);
  }
  Place& place = places_[index];
  const torch::Tensor grad = parameter.defined() ? parameter.grad() : torch::Tensor();
  if (!grad.defined()) {
    const bool had = views_[index].data != nullptr;
    place = {};
    views_[index] = {};
    return had;
  }
  const bool dense = is_dense(grad) && grad.sizes() == parameter.sizes() &&
                     (order == Order::kAny || same_order(grad, parameter));
  if (dense && Place(grad) == place) {  // the common case, without any allocation
    held_.push_back(grad);
    return false;
  }
  const torch::NoGradGuard no_grad;
  check_gradient(parameter, grad, name);
  held_.push_back(dense ? grad : make_dense(parameter, order, name));
  views_[index] = view_of(held_.back(), "The gradient of " + name);
  // To the core null data means no gradient; an empty tensor is a gradient without elements.
  static char empty;
  if (views_[index].data == nullptr) views_[index].data = &empty;
  place = dense ? Place(grad) : Place();  // a staged gradient is copied in every step
  return true;
}

void Gradients::write_back() {
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& grad : held_) grad.unsafeGetTensorImpl()->bump_version();
  for (Staged& staged : staged_) {
    // Expanded tensors, whose elements share memory, and sparse ones are replaced by the copy.
    const bool in_place = staged.grad.layout() == torch::kStrided &&
                          at::has_internal_overlap(staged.grad) != at::MemOverlap::Yes;
    if (in_place) {
      staged.grad.copy_(staged.memory);
    } else {
      staged.parameter.mutable_grad() = staged.memory;
    }
  }
}

}  // namespace internal

TensorView view_of(const torch::Tensor& tensor, const std::string& name) {
  const torch::Tensor plain = internal::as_real(tensor);
  static const std::map<torch::ScalarType, DType> types = {{torch::kHalf, DType::kF16},
                                                           {torch::kBFloat16, DType::kBF16},
                                                           {torch::kFloat, DType::kF32},
                                                           {torch::kDouble, DType::kF64}};
  const auto dtype = types.find(plain.scalar_type());
  if (dtype == types.end()) {
    internal::unsupported(name + " has type " + torch::toString(tensor.scalar_type()) +
                          "; use half, bfloat16, float, double or a complex type.");
  }
  Device device;
  if (tensor.is_cuda()) {
    device = {DeviceType::kCUDA, static_cast<int>(tensor.device().index())};
  } else if (!tensor.is_cpu()) {
    internal::unsupported(name + " is on device " + tensor.device().str() + "; use cpu or cuda.");
  }
  return view(plain.data_ptr(), dtype->second, plain.numel(), device);
}

}  // namespace headroom::libtorch
