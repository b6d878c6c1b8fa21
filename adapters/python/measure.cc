// Policies, and what one read of the gradients finds.
#include <headroom/measure.h>
#include <headroom/policy.h>
#include <pybind11/stl.h>

#include "tensors.h"

namespace headroom::python {

void bind_policy(py::module_& m) {
  py::enum_<OnOverflow>(m, "OnOverflow")
      .value("SKIP", OnOverflow::kSkip)
      .value("THROW", OnOverflow::kThrow);

  auto policy =
      py::class_<ScalePolicy>(m, "ScalePolicy", "How the scale moves; see docs/policies.md.");
  policy
      .def(py::init([policy](const py::kwargs& settings) {
        ScalePolicy made;
        py::object self = py::cast(&made, py::return_value_policy::reference);
        for (const auto& [name, value] : settings) {
          if (!py::hasattr(policy, name)) {
            throw py::type_error("ScalePolicy has no setting '" +
                                 py::str(name).cast<std::string>() + "'");
          }
          py::setattr(self, name, value);
        }
        validate(made);
        return made;
      }))
      .def_readwrite("dynamic", &ScalePolicy::dynamic)
      .def_readwrite("init_scale", &ScalePolicy::init_scale)
      .def_readwrite("growth_factor", &ScalePolicy::growth_factor)
      .def_readwrite("backoff_factor", &ScalePolicy::backoff_factor)
      .def_readwrite("growth_interval", &ScalePolicy::growth_interval)
      .def_readwrite("min_scale", &ScalePolicy::min_scale)
      .def_readwrite("max_scale", &ScalePolicy::max_scale)
      .def_readwrite("first_growth_extra", &ScalePolicy::first_growth_extra)
      .def_readwrite("next_growth_extra", &ScalePolicy::next_growth_extra)
      .def_readwrite("hysteresis", &ScalePolicy::hysteresis)
      .def_readwrite("refill_on_growth", &ScalePolicy::refill_on_growth)
      .def_readwrite("refill_on_clean", &ScalePolicy::refill_on_clean)
      .def_readwrite("refill_on_shrink", &ScalePolicy::refill_on_shrink)
      .def_readwrite("tolerance", &ScalePolicy::tolerance)
      .def_readwrite("late", &ScalePolicy::late)
      .def_readwrite("stay_above_min", &ScalePolicy::stay_above_min)
      .def_readwrite("on_overflow", &ScalePolicy::on_overflow)
      .def_readwrite("max_skips_in_row", &ScalePolicy::max_skips_in_row)
      .def_readwrite("grad_limit", &ScalePolicy::grad_limit)
      .def_readwrite("peak_window", &ScalePolicy::peak_window)
      .def_readwrite("retry_interval", &ScalePolicy::retry_interval)
      .def_readwrite("rerun", &ScalePolicy::rerun);

  m.def("preset", &preset);
  m.def("presets", [] {
    py::dict all;
    for (const PresetInfo& info : presets()) all[info.name] = info.summary;
    return all;
  });
}

void bind_measure(py::module_& m) {
  py::class_<GradStats>(m, "GradStats", "What one read of a list of gradients found.")
      .def_readonly("count", &GradStats::count, "Elements read.")
      .def_readonly("inf_count", &GradStats::inf_count)
      .def_readonly("nan_count", &GradStats::nan_count)
      .def_readonly("amax", &GradStats::amax, "The largest finite magnitude.")
      .def_readonly("culprit", &GradStats::culprit,
                    "Index of the first tensor with inf or nan; -1 if there is none.")
      .def_readonly("culprit_inf", &GradStats::culprit_inf)
      .def_readonly("culprit_nan", &GradStats::culprit_nan)
      .def_property_readonly("finite", &GradStats::finite)
      .def_property_readonly("norm", &GradStats::norm, "L2 norm of the gradients as they are.")
      .def_property_readonly("zeros", [](const GradStats& s) { return s.detail.zeros; })
      .def_property_readonly("subnormals", [](const GradStats& s) { return s.detail.subnormals; })
      .def_property_readonly(
          "histogram",
          [](const GradStats& stats) {
            py::dict counts;
            for (size_t i = 0; i < stats.detail.histogram.size(); ++i) {
              const int64_t count = stats.detail.histogram[i];
              if (count != 0)
                counts[py::int_(GradDetail::kMinExponent + static_cast<int>(i))] = count;
            }
            return counts;
          },
          "With detail: {e: elements with 2^e <= |x| < 2^(e+1)}, where there are any.");
  py::class_<UnscaleResult>(m, "UnscaleResult", "What unscale_ found and did.")
      .def_readonly("before", &UnscaleResult::before, "The gradients as they arrived.")
      .def_readonly("new_inf", &UnscaleResult::new_inf)
      .def_readonly("new_zeros", &UnscaleResult::new_zeros)
      .def_property_readonly("ok", &UnscaleResult::ok);

  m.def(
      "measure",
      [](const py::sequence& grads, bool detail, uintptr_t stream) {
        const std::vector<TensorView> views = views_of(grads);
        const Work work(stream);
        return measure(views, {detail});
      },
      py::arg("grads"), py::arg("detail") = false, py::arg("stream") = 0);
  m.def(
      "unscale_",
      [](const py::sequence& grads, float inverse_scale, uintptr_t stream) {
        const std::vector<TensorView> views = views_of(grads);
        const Work work(stream);
        return unscale_(views, inverse_scale);
      },
      py::arg("grads"), py::arg("inverse_scale"), py::arg("stream") = 0);
}

}  // namespace headroom::python
