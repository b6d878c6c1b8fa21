#include <headroom/scaler.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <utility>

#include "tensors.h"

namespace headroom::python {
namespace {

const char* name_of(Skip skip) {
  const char* const names[] = {"", "not finite", "unscale overflow"};
  return names[static_cast<int>(skip)];
}

const char* name_of(Alarm alarm) {
  const char* const names[] = {"", "at floor", "skips in row"};
  return names[static_cast<int>(alarm)];
}

ClearGrads clear_named(const std::string& name) {
  if (name == "on_skip") return ClearGrads::kOnSkip;
  if (name == "always") return ClearGrads::kAlways;
  if (name == "never") return ClearGrads::kNever;
  throw py::value_error("clear_grads is '" + name + "'; it is one of on_skip, always and never.");
}

}  // namespace

void bind_scaler(py::module_& m) {
  py::class_<StepReport>(m, "StepReport", "What one step did; str() is a line for a log.")
      .def_readonly("pending", &StepReport::pending)
      .def_readonly("applied", &StepReport::applied)
      .def_property_readonly("skip", [](const StepReport& r) { return name_of(r.skip); })
      .def_readonly("scale", &StepReport::scale)
      .def_readonly("grad_norm", &StepReport::grad_norm)
      .def_readonly("clip_factor", &StepReport::clip_factor)
      .def_readonly("stats", &StepReport::stats)
      .def_readonly("culprit", &StepReport::culprit)
      .def_readonly("steps", &StepReport::steps)
      .def_readonly("skipped", &StepReport::skipped)
      .def("__str__", &StepReport::to_string)
      .def("__repr__", [](const StepReport& r) { return "<StepReport: " + r.to_string() + ">"; });
  py::class_<AlarmReport>(m, "AlarmReport", "Training is in trouble; str() says how.")
      .def_property_readonly("alarm", [](const AlarmReport& a) { return name_of(a.alarm); })
      .def_readonly("scale", &AlarmReport::scale)
      .def_readonly("skips_in_row", &AlarmReport::skips_in_row)
      .def_readonly("culprit", &AlarmReport::culprit)
      .def("__str__", [](const AlarmReport& a) { return a.sentence; });

  py::class_<GradScaler>(m, "GradScaler")
      .def(py::init([](const ScalePolicy& policy, bool enabled, int device,
                       std::function<void(const AlarmReport&)> on_alarm, uintptr_t stream) {
        ScalerOptions options;
        options.enabled = enabled;
        if (device >= 0) options.device = {DeviceType::kCUDA, device};
        options.on_alarm = std::move(on_alarm);
        const Work work(stream);
        return std::make_unique<GradScaler>(policy, std::move(options));
      }))
      .def_property_readonly("policy", [](const GradScaler& s) { return s.policy(); })
      .def("set_policy", &GradScaler::set_policy)
      .def_property_readonly("enabled", &GradScaler::enabled)
      .def("get_scale", &GradScaler::get_scale, py::call_guard<py::gil_scoped_release>())
      .def("scale", [](GradScaler& self, float loss) { return self.scale(loss); })
      .def("scale_into",
           [](GradScaler& self, const Tensor& loss, const Tensor& scaled, uintptr_t stream) {
             const Work work(stream);
             self.scale(loss.view, scaled.view);
           })
      .def("unscale_",
           [](GradScaler& self, Optimizer& optimizer, uintptr_t stream) {
             const Work work(stream);
             return self.unscale_(optimizer);
           })
      .def(
          "step",
          [](GradScaler& self, Optimizer& optimizer, float max_norm, const std::string& clear,
             uintptr_t stream, uintptr_t outside_scale, uintptr_t outside_found,
             uintptr_t tell_skipped) {
            const StepOptions options{max_norm, clear_named(clear),
                                      reinterpret_cast<const float*>(outside_scale),
                                      reinterpret_cast<const float*>(outside_found),
                                      reinterpret_cast<float*>(tell_skipped)};
            const Work work(stream);
            return self.step(optimizer, options);
          },
          py::arg("optimizer"), py::arg("max_norm"), py::arg("clear_grads"), py::arg("stream"),
          py::arg("outside_scale") = 0, py::arg("outside_found") = 0, py::arg("tell_skipped") = 0)
      .def("report", py::overload_cast<>(&GradScaler::report, py::const_),
           py::call_guard<py::gil_scoped_release>())
      .def("try_report", py::overload_cast<>(&GradScaler::try_report, py::const_),
           py::call_guard<py::gil_scoped_release>())
      .def("update",
           [](GradScaler& self, std::optional<float> new_scale, uintptr_t stream) {
             const Work work(stream);
             if (new_scale.has_value()) {
               self.update(*new_scale);
             } else {
               self.update();
             }
           })
      .def("run_again", &GradScaler::run_again, py::call_guard<py::gil_scoped_release>())
      .def("discard", &GradScaler::discard)
      .def("save", &GradScaler::save, py::call_guard<py::gil_scoped_release>())
      .def("load", [](GradScaler& self, const std::string& json) { self.load(json); });
}

}  // namespace headroom::python
