// The extension module: registers all classes and converts headroom::Error to headroom.Error.
#include <headroom/error.h>
#include <headroom/runtime.h>
#include <headroom/version.h>
#include <pybind11/stl.h>

#include <exception>

#include "tensors.h"

namespace headroom::python {

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled part of headroom. Use the package headroom, not this module.";
  m.attr("version") = HEADROOM_VERSION;
  // The exception class is looked up when it is needed, because headroom._errors is Python code
  // that is imported after this module.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (const Error& error) {
      const py::object raised = py::module_::import("headroom._errors")
                                    .attr("make")(to_string(error.code()), error.what());
      PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
    }
  });
  bind_tensors(m);
  bind_policy(m);
  bind_measure(m);
  bind_optimizers(m);
  bind_callbacks(m);
  bind_scaler(m);
  bind_scale_state(m);
  bind_places(m);
  bind_tools(m);
  bind_ranges(m);
  bind_trace(m);
  m.def("set_num_threads", &set_num_threads);
  m.def("num_threads", &num_threads);
  m.def("simd_target", &simd_target);
  m.def("cuda_available", &cuda_available);
}

}  // namespace headroom::python
