// Detects whether the tensors of a torch optimizer have moved since the last step. This runs for
// hundreds of tensors in every step, so it must be fast.
#include <utility>

#include "reader.h"
#include "tensors.h"

namespace headroom::python {
namespace {

// Calls the C getter of a property directly: looking it up by name takes longer than calling it.
class Getter {
 public:
  Getter(py::handle type, const char* name) : descriptor_(type.attr(name)) {
    if (!Py_IS_TYPE(descriptor_.ptr(), &PyGetSetDescr_Type)) {
      throw py::type_error("A property of this torch's Tensor is not a C getter.");
    }
    set_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())->d_getset;
  }

  py::object operator()(py::handle object) const {
    if (!PyObject_TypeCheck(object.ptr(), PyDescr_TYPE(descriptor_.ptr()))) {
      throw py::type_error("The object is not a torch.Tensor.");
    }
    auto value = py::reinterpret_steal<py::object>(set_->get(object.ptr(), set_->closure));
    if (!value) throw py::error_already_set();
    return value;
  }

 private:
  py::object descriptor_;
  const PyGetSetDef* set_;
};

class Places {
 public:
  explicit Places(TensorReader reader)
      : reader_(std::move(reader)),
        grad_(reader_.tensor_type(), "grad"),
        version_(reader_.tensor_type(), "_version") {}

  // Whether both lists contain the same objects.
  static bool same(const py::list& a, const py::list& b) {
    bool same = a.size() == b.size();
    for (size_t i = 0; same && i < a.size(); ++i) {
      same = PyList_GET_ITEM(a.ptr(), i) == PyList_GET_ITEM(b.ptr(), i);
    }
    return same;
  }

  // Compares with the last call. Returns whether a parameter or gradient has moved, whether a
  // parameter has, and, if asked for, the indices of parameters that others have written to since
  // then (torch's version counter differs from the last call plus advance()).
  py::tuple look(const py::list& parameters, bool with_versions) {
    std::vector<int64_t> versions;
    versions.reserve(parameters.size());
    weights_.begin();
    grads_.begin();
    for (const py::handle parameter : parameters) {
      add(parameter, &weights_);
      add(grad_(parameter), &grads_);
      if (with_versions) versions.push_back(version_(parameter).cast<int64_t>());
    }
    const bool weights_moved = weights_.moved();
    const bool moved = grads_.moved() || weights_moved;
    py::list changed;
    for (size_t i = 0; i < versions.size(); ++i) {
      if (i >= versions_.size() || versions[i] != versions_[i]) changed.append(i);
    }
    versions_ = std::move(versions);
    return py::make_tuple(moved, weights_moved, changed);
  }

  // The optimizer itself has written to these parameters once.
  void advance(const std::vector<size_t>& parameters) {
    if (versions_.empty()) return;
    for (const size_t i : parameters) ++versions_.at(i);
  }

 private:
  // A sequence of numbers that describes tensors, compared with that of the last call.
  class Seen {
   public:
    void begin() {
      place_ = 0;
      moved_ = false;
    }
    void note(int64_t value) {
      if (place_ == values_.size() || values_[place_] != value) {
        moved_ = true;
        values_.resize(place_);
        values_.push_back(value);
      }
      ++place_;
    }
    void cannot_tell() { moved_ = true; }

    // Ends the sequence: whether it differs from the last one.
    bool moved() {
      moved_ = moved_ || place_ != values_.size();
      values_.resize(place_);
      return moved_;
    }

   private:
    std::vector<int64_t> values_;
    size_t place_ = 0;
    bool moved_ = false;
  };

  void add(py::handle tensor, Seen* seen) {
    const auto note = [seen](int64_t value) { seen->note(value); };
    DLTensor view;
    if (tensor.is_none()) {
      note(-1);
    } else if (!reader_.read(tensor, &view)) {
      seen->cannot_tell();
    } else {
      note(reinterpret_cast<intptr_t>(view.data) + static_cast<int64_t>(view.byte_offset));
      note(int64_t{view.dtype.code} << 32 | int64_t{view.dtype.bits} << 16 |
           int64_t{view.dtype.lanes});
      note(int64_t{view.device.device_type} << 32 | int64_t{view.device.device_id});
      note(view.ndim);
      for (int i = 0; i < view.ndim; ++i) note(view.shape[i]);
      for (int i = 0; view.strides != nullptr && i < view.ndim; ++i) note(view.strides[i]);
    }
  }

  TensorReader reader_;
  Getter grad_, version_;
  Seen weights_, grads_;
  std::vector<int64_t> versions_;
};

}  // namespace

void bind_places(py::module_& m) {
  py::class_<TensorReader>(m, "TensorReader")
      .def(py::init<const py::capsule&, std::vector<py::type>>());
  py::class_<Places>(m, "Places")
      .def(py::init<const TensorReader&>())
      .def_static("same", &Places::same)
      .def("look", &Places::look)
      .def("advance", &Places::advance);
}

}  // namespace headroom::python
