// measure(), measure_detail() and unscale_(), and their results.
#include <headroom/measure.h>

#include <utility>

#include "tensors.h"

namespace headroom::python {

namespace {

void bind_stats(py::module_& m) {
  py::class_<GradStats>(m, "GradStats", "Statistics of a list of gradients.")
      .def_readonly<&GradStats::count>("count", "Elements read.")
      .def_readonly<&GradStats::inf_count>("inf_count")
      .def_readonly<&GradStats::nan_count>("nan_count")
      .def_readonly<&GradStats::amax>("amax", "Largest finite magnitude.")
      .def_readonly<&GradStats::culprit>(
          "culprit", "Index of the first tensor with inf or nan; -1 if there is none.")
      .def_readonly<&GradStats::culprit_inf>("culprit_inf")
      .def_readonly<&GradStats::culprit_nan>("culprit_nan")
      .def_property_readonly("finite", py::fn<&GradStats::finite>)
      .def_property_readonly("norm", py::fn<&GradStats::norm>,
                             "L2 norm; nan if any element is nan, else inf if any is.")
      .def_readonly<&GradStats::new_inf>("new_inf",
                                         "Finite elements that unscale_ turned into inf.")
      .def_readonly<&GradStats::new_zeros>("new_zeros",
                                           "Nonzero elements that unscale_ turned into zero.")
      .def_property_readonly("ok", py::fn<&GradStats::ok>,
                             "All elements are finite, before and after unscale_.");
  // A dict instead of 277 counts, most of which are zero.
  py::class_<GradDetail>(m, "GradDetail", "Element counts by magnitude.")
      .def_readonly<&GradDetail::zeros>("zeros")
      .def_readonly<&GradDetail::subnormals>("subnormals")
      .def_property_readonly(
          "histogram",
          [](const GradDetail& detail) {
            py::dict counts;
            int exponent = GradDetail::kMinExponent;
            for (const int64_t count : detail.histogram) {
              if (count != 0) counts.set(exponent, count);
              ++exponent;
            }
            return counts;
          },
          "{e: number of elements with 2^e <= |x| < 2^(e+1)}, without zero counts.");
}

}  // namespace

void bind_measure(py::module_& m) {
  bind_stats(m);
  using Views = std::vector<TensorView>;
  m.def("measure", with_stream([](const Views& grads) { return measure(grads); }), py::arg("grads"),
        py::arg("stream") = 0);
  m.def("measure_detail", with_stream([](const Views& grads) {
          GradDetail detail;
          const GradStats stats = measure(grads, &detail);
          return std::make_pair(stats, detail);
        }),
        py::arg("grads"), py::arg("stream") = 0);
  m.def("unscale_", on_stream<&unscale_>, py::arg("grads"), py::arg("inverse_scale"),
        py::arg("stream") = 0);
}

}  // namespace headroom::python
