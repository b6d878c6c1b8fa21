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
    get_ = reinterpret_cast<descrgetfunc>(PyType_GetSlot(&PyGetSetDescr_Type, Py_tp_descr_get));
  }

  /// Throws a TypeError if the object is not a tensor.
  py::object operator()(py::handle object) const {
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    return py::object::steal(get_(descriptor_.ptr(), object.ptr(), type));
  }

 private:
  py::object descriptor_;
  descrgetfunc get_;
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
      same = a[i].is(b[i]);
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
    for (size_t i = 0; i < parameters.size(); ++i) {
      const py::object parameter = py::object::borrow(parameters[i]);
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
    void mark_moved() { moved_ = true; }

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
      seen->mark_moved();
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
      .def_constructor<const py::capsule&, std::vector<py::type>>();
  py::class_<Places>(m, "Places")
      .def_constructor<const TensorReader&>()
      .def_static("same", py::fn<&Places::same>)
      .def("look", py::fn<&Places::look>)
      .def("advance", py::fn<&Places::advance>);
}

}  // namespace headroom::python
