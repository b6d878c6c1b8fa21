// The extension module: registers all classes and converts headroom::Error to headroom.Error.
#include <headroom/error.h>
#include <headroom/runtime.h>
#include <headroom/version.h>

#include "tensors.h"

namespace headroom::python {

namespace {

// The exception class is looked up when it is needed, because headroom._errors is Python code that
// is imported after this module.
void translate() {
  try {
    throw;
  } catch (const Error& error) {
    const py::object errors = py::object::steal(PyImport_ImportModule("headroom._errors"));
    const py::object raised = errors.attr("make")(to_string(error.code()), error.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  }
}

void bind_all(py::module_& m) {
  m.add("version", HEADROOM_VERSION);
  m.add("cuda_version", HEADROOM_CUDA_VERSION);
  py::set_translator(&translate);
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
  m.def("set_num_threads", py::fn<&set_num_threads>, py::arg("threads"),
        "Limits the threads of Headroom's work on the CPU.");
  m.def("num_threads", py::fn<&num_threads>, "The number of threads for work on the CPU.");
  m.def("simd_target", py::fn<&simd_target>, "The instruction set that the CPU's kernels use.");
  m.def("cuda_available", py::fn<&cuda_available>, "Whether there is a CUDA device to work on.");
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_core",
    "The compiled part of headroom. Use the package headroom, not this module.",
    -1,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

}  // namespace
}  // namespace headroom::python

// The entry point: CPython looks it up by this name.
// NOLINTNEXTLINE(bugprone-reserved-identifier)
PyMODINIT_FUNC PyInit__core() {
  using namespace headroom::python;
  try {
    py::module_ m(py::object::steal(PyModule_Create(&definition)));
    bind_all(m);
    return m.release();
  } catch (...) {
    py::raise_current_exception();
    return nullptr;
  }
}
