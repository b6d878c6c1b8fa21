// adapters/python/ is the extension module headroom._core. This header has tensors: whatever Python
// hands over, as views of memory that stays valid as long as they do.
#ifndef HEADROOM_ADAPTERS_PYTHON_TENSORS_H_
#define HEADROOM_ADAPTERS_PYTHON_TENSORS_H_

#include <headroom/runtime.h>
#include <headroom/tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

namespace headroom::python {

namespace py = pybind11;

/// A view, and what keeps its memory alive.
struct Tensor {
  TensorView view;
  std::shared_ptr<void> memory;
};

/// "float16", "bfloat16", "float32" or "float64", or the core's short names.
DType dtype_named(const std::string& name);

/// Each is a Tensor, None (no tensor), or a tuple (pointer, type, count, CUDA device or -1), whose
/// memory the caller keeps alive.
TensorView view_of(py::handle item);
std::vector<TensorView> views_of(const py::sequence& items);

/// A Tensor over memory that `owner` keeps alive.
Tensor owned_by(py::object owner, const TensorView& view);

/// As a stream: the framework's current one on each device, see set_stream_getter().
inline constexpr uintptr_t kCurrentStreams = ~uintptr_t{0};
Stream stream_from(uintptr_t stream);

/// Work without the interpreter lock, on this CUDA stream.
class Work {
 public:
  explicit Work(uintptr_t stream) : stream_(stream_from(stream)) {}

 private:
  py::gil_scoped_release release_;
  StreamScope stream_;
};

void bind_tensors(py::module_& m);
void bind_policy(py::module_& m);
void bind_measure(py::module_& m);
void bind_optimizers(py::module_& m);
void bind_scaler(py::module_& m);
void bind_places(py::module_& m);
void bind_callbacks(py::module_& m);

}  // namespace headroom::python

#endif  // HEADROOM_ADAPTERS_PYTHON_TENSORS_H_
