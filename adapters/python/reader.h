// Reads the memory, shape and strides of torch tensors without linking libtorch, much faster than
// through their attributes: torch 2.10 and later export DLPack's table of C functions.
#ifndef HEADROOM_ADAPTERS_PYTHON_READER_H_
#define HEADROOM_ADAPTERS_PYTHON_READER_H_

#include <dlpack/dlpack.h>
#include <headroom/error.h>
#include <headroom/tensor.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "bind/convert.h"

namespace headroom::python {

namespace py = bind;

class TensorReader {
 public:
  /// `plain`: the exact types that store their own memory (subclasses may not); torch.Tensor first.
  /// Throws a TypeError if torch offers no such table.
  TensorReader(const py::capsule& api, std::vector<py::type> plain) : plain_(std::move(plain)) {
    const auto* const table = static_cast<const ExchangeApi*>(api.get_pointer());
    if (table->major == 1) tensor_from_object_ = table->tensor_from_object;
    if (tensor_from_object_ == nullptr) {
      throw py::type_error("This version of DLPack's exchange API is not supported.");
    }
  }

  const py::type& tensor_type() const { return plain_.at(0); }

  /// False for tensors that have no memory of their own, or none that DLPack can describe. The
  /// shape and strides belong to the tensor.
  bool read(py::handle tensor, DLTensor* out) const {
    if (!is_plain(tensor)) return false;
    if (tensor_from_object_(tensor.ptr(), out) == 0) return true;
    PyErr_Clear();
    return false;
  }

  /// The memory of a tensor whose elements fill one block, in any order of dimensions; empty for
  /// others.
  std::optional<TensorView> view(py::handle tensor) const {
    DLManagedTensor managed = {};
    Dimensions dimensions;
    if (!read(tensor, &managed.dl_tensor)) return std::nullopt;
    if (managed.dl_tensor.data == nullptr) return std::nullopt;  // the storage was freed
    if (!sort_dimensions(&managed.dl_tensor, &dimensions)) return std::nullopt;
    try {
      return from_dlpack(&managed);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;  // such as: not contiguous
      return std::nullopt;
    }
  }

 private:
  static constexpr int kMostDimensions = 16;
  using Dimensions = std::array<int64_t, 2 * kMostDimensions>;

  // Orders the dimensions as they are in memory, so that a transposed tensor counts as contiguous.
  // Returns false if there are too many.
  static bool sort_dimensions(DLTensor* tensor, Dimensions* storage) {
    if (tensor->strides == nullptr) return true;
    if (tensor->ndim > kMostDimensions) return false;
    int64_t* const shape = storage->data();
    int64_t* const strides = shape + kMostDimensions;
    for (int i = 0; i < tensor->ndim; ++i) {
      int at = i;
      for (; at > 0 && strides[at - 1] < tensor->strides[i]; --at) {
        shape[at] = shape[at - 1];
        strides[at] = strides[at - 1];
      }
      shape[at] = tensor->shape[i];
      strides[at] = tensor->strides[i];
    }
    tensor->shape = shape;
    tensor->strides = strides;
    return true;
  }

  // DLPack 1.2's table of functions, which Debian's header lacks.
  struct ExchangeApi {
    uint32_t major;
    uint32_t minor;
    void* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, DLTensor* out);  // null: not offered
    void* current_stream;
  };

  bool is_plain(py::handle tensor) const {
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    for (const py::type& plain : plain_) {
      if (plain.ptr() == type) return true;
    }
    return false;
  }

  int (*tensor_from_object_)(void*, DLTensor*) = nullptr;
  std::vector<py::type> plain_;
};

}  // namespace headroom::python

#endif  // HEADROOM_ADAPTERS_PYTHON_READER_H_
