// Whether the tensors of a torch optimizer are where they were in the last step: a look at hundreds
// of them in every step, which has to cost next to nothing. Torch (2.10 and later) shows its
// tensors through DLPack's table of C functions, without a link against libtorch.
#include <dlpack/dlpack.h>
#include <pybind11/stl.h>

#include <utility>

#include "tensors.h"

namespace headroom::python {
namespace {

// DLPack 1.2's table, which Debian's header does not have yet.
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

class Places {
 public:
  // `plain`: the types whose objects have their memory themselves.
  Places(const py::capsule& api, std::vector<py::type> plain) : plain_(std::move(plain)) {
    const auto* const table = api.get_pointer<const ExchangeApi>();
    if (table->major == 1) tensor_from_object_ = table->tensor_from_object;
    if (tensor_from_object_ == nullptr) {
      throw py::type_error("This version of DLPack's exchange API cannot be used.");
    }
  }

  // Whether anything moved since the last call, and on request the parameters whose values somebody
  // changed since then and the last advance().
  py::tuple look(const py::list& parameters, bool with_versions) {
    std::vector<int64_t> seen;
    std::vector<int64_t> versions;
    seen.reserve(seen_.size());
    versions.reserve(parameters.size());
    bool plain = true;
    for (const py::handle parameter : parameters) {
      const auto gradient =
          py::reinterpret_steal<py::object>(PyObject_GetAttr(parameter.ptr(), grad_.ptr()));
      if (!gradient) throw py::error_already_set();
      plain = plain && add(parameter, &seen) && add(gradient, &seen);
      if (with_versions) versions.push_back(parameter.attr(version_).cast<int64_t>());
    }
    const bool moved = !plain || seen != seen_;
    py::list changed;
    for (size_t i = 0; i < versions.size(); ++i) {
      if (i >= versions_.size() || versions[i] != versions_[i]) changed.append(i);
    }
    seen_ = plain ? std::move(seen) : std::vector<int64_t>{};
    versions_ = std::move(versions);
    return py::make_tuple(moved, changed);
  }

  // These parameters were changed by the optimizer itself.
  void advance(const std::vector<size_t>& parameters) {
    if (versions_.empty()) return;
    for (const size_t i : parameters) ++versions_.at(i);
  }

 private:
  bool add(py::handle tensor, std::vector<int64_t>* seen) const {
    if (tensor.is_none()) {
      seen->push_back(-1);
      return true;
    }
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    bool known = false;
    for (const py::type& plain : plain_) known = known || plain.ptr() == type;
    if (!known) return false;
    DLTensor view;
    if (tensor_from_object_(tensor.ptr(), &view) != 0) {
      PyErr_Clear();
      return false;
    }
    seen->push_back(reinterpret_cast<intptr_t>(view.data) + static_cast<int64_t>(view.byte_offset));
    seen->push_back(int64_t{view.dtype.code} << 32 | int64_t{view.dtype.bits} << 16 |
                    int64_t{view.dtype.lanes});
    seen->push_back(int64_t{view.device.device_type} << 32 | int64_t{view.device.device_id});
    seen->push_back(view.ndim);
    seen->insert(seen->end(), view.shape, view.shape + view.ndim);
    if (view.strides != nullptr) {
      seen->insert(seen->end(), view.strides, view.strides + view.ndim);
    }
    return true;
  }

  int (*tensor_from_object_)(void*, DLTensor*) = nullptr;
  std::vector<py::type> plain_;
  py::str grad_ = "grad", version_ = "_version";
  std::vector<int64_t> seen_, versions_;
};

}  // namespace

void bind_places(py::module_& m) {
  py::class_<Places>(m, "Places")
      .def(py::init<const py::capsule&, std::vector<py::type>>())
      .def("look", &Places::look)
      .def("advance", &Places::advance);
}

}  // namespace headroom::python
