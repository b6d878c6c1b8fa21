// adapters/python is the extension module headroom._core. It converts Python objects to the core's
// types and decides no rule of training. The public API is in the Python files of the package.
//
// This header converts tensors, and runs calls of the core without the interpreter lock.
#ifndef HEADROOM_ADAPTERS_PYTHON_TENSORS_H_
#define HEADROOM_ADAPTERS_PYTHON_TENSORS_H_

#include <headroom/runtime.h>
#include <headroom/tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/class.h"

namespace headroom::python {

namespace py = bind;

using bind::hold;

/// A view and a reference that keeps its memory alive.
struct Tensor {
  TensorView view;
  std::shared_ptr<void> memory;
};

/// The type of "float16", "bfloat16", "float32", "float64", or of the core's short names. Throws
/// Error(kUnsupported) for other names.
DType dtype_named(const std::string& name);

/// Converts a Tensor, None (no tensor), or a tuple (pointer, type, count, CUDA device or -1). The
/// view does not own the memory: the caller must keep the Tensor, or the memory of the tuple,
/// alive.
TensorView view_of(py::handle item);

/// A Tensor that keeps `owner` alive.
Tensor owned_by(py::object owner, const TensorView& view);

/// As a stream: the framework's current one on each device, see set_stream_getter(); the default
/// stream if no framework was imported.
inline constexpr uintptr_t kCurrentStreams = ~uintptr_t{0};
Stream stream_from(uintptr_t stream);

/// During its lifetime the interpreter lock is released, and the core's CUDA work goes to `stream`
/// (a cudaStream_t; 0 is the default stream; or kCurrentStreams).
class Work {
 public:
  explicit Work(uintptr_t stream) : stream_(stream_from(stream)) {}

 private:
  py::gil_scoped_release release_;
  StreamScope stream_;
};

/// A function of C++ whose Python form has one more argument, `stream`, and that runs during Work.
/// Its arguments are converted before, with the interpreter lock.
template <typename F, typename = typename py::Traits<F>::Parameters>
struct OnStream;
template <typename F, typename... Arguments>
struct OnStream<F, std::tuple<Arguments...>> {
  typename py::Traits<F>::Result operator()(Arguments... arguments, uintptr_t stream) const {
    const Work work(stream);
    return F{}(std::forward<Arguments>(arguments)...);
  }
};
template <auto f>
inline constexpr OnStream<py::Function<f>> on_stream{};
template <typename F>
constexpr OnStream<F> with_stream(F) {
  return {};
}

void bind_tensors(py::module_& m);
void bind_policy(py::module_& m);
void bind_measure(py::module_& m);
void bind_optimizers(py::module_& m);
void bind_scaler(py::module_& m);
void bind_scale_state(py::module_& m);
void bind_places(py::module_& m);
void bind_callbacks(py::module_& m);
void bind_tools(py::module_& m);
void bind_ranges(py::module_& m);
void bind_trace(py::module_& m);

}  // namespace headroom::python

/// As view_of(): the caller keeps the memory alive.
template <>
struct headroom::python::bind::Converter<headroom::TensorView> {
  static TensorView from(handle from) { return view_of(from); }
};

#endif  // HEADROOM_ADAPTERS_PYTHON_TENSORS_H_
