// Reads the memory, shape and strides of torch tensors without linking libtorch, much faster than
// through their attributes: torch 2.10 and later export DLPack's table of C functions.
#ifndef HEADROOM_ADAPTERS_PYTHON_READER_H_
#define HEADROOM_ADAPTERS_PYTHON_READER_H_

#include <dlpack/dlpack.h>

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

 private:
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
