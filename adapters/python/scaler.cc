// GradScaler, StepReport and AlarmReport. Enumerators become words.

#include <utility>

#include "scaler/scaler.h"
#include "tensors.h"

namespace headroom::python {

using internal::ScalerAccess;

namespace {

// Indexed by the enumerators' values.
const char* name_of(Skip skip) {
  const char* const names[] = {"", "not finite", "unscale overflow", "norm too large"};
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
  throw py::value_error("clear_grads is '" + name + "'; it must be on_skip, always or never.");
}

// A step with the scale and the inf flag of torch's own scaler, which are device pointers; 0 if
// there is none.
StepReport step(GradScaler& self, Optimizer& optimizer, float max_norm, float skip_above_norm,
                const std::string& clear, uintptr_t stream, uintptr_t scale, uintptr_t found_inf) {
  StepOptions options;
  options.max_norm = max_norm;
  options.skip_above_norm = skip_above_norm;
  options.clear_grads = clear_named(clear);
  const internal::ExternalScale external{reinterpret_cast<const float*>(scale),
                                         reinterpret_cast<const float*>(found_inf)};
  const Work work(stream);
  return ScalerAccess::step(self, optimizer, options, external);
}

std::unique_ptr<GradScaler> make_scaler(const ScalePolicy& policy, bool enabled, int device,
                                        std::function<void(const AlarmReport&)> on_alarm,
                                        uintptr_t stream) {
  ScalerOptions options;
  options.enabled = enabled;
  if (device >= 0) options.device = {DeviceType::kCUDA, device};
  options.on_alarm = std::move(on_alarm);
  const Work work(stream);
  return std::make_unique<GradScaler>(policy, std::move(options));
}

void set_ranks(GradScaler& self, std::shared_ptr<Ranks> ranks, bool sharded) {
  const auto kind = sharded ? RankGradients::kSharded : RankGradients::kReplicated;
  ScalerAccess::set_ranks(self, std::move(ranks), kind);
}

// The address of {found_inf, divisor, grad_norm} of the optimizer's last step, or 0.
uintptr_t numbers_address(GradScaler& self, const Optimizer& optimizer) {
  return reinterpret_cast<uintptr_t>(ScalerAccess::numbers_of(self, optimizer));
}

uintptr_t scale_address(GradScaler& self) {
  return reinterpret_cast<uintptr_t>(ScalerAccess::scale_address(self));
}

void bind_reports(py::module_& m) {
  py::class_<StepReport>(m, "StepReport", "The outcome of one step; str() is a line for a log.")
      .def_readonly<&StepReport::pending>("pending")
      .def_readonly<&StepReport::applied>("applied")
      .def_property_readonly("skip", [](const StepReport& r) { return name_of(r.skip); })
      .def_readonly<&StepReport::scale>("scale")
      .def_readonly<&StepReport::grad_norm>("grad_norm")
      .def_readonly<&StepReport::clip_factor>("clip_factor")
      .def_readonly<&StepReport::stats>("stats")
      .def_readonly<&StepReport::culprit>("culprit")
      .def_readonly<&StepReport::steps>("steps")
      .def_readonly<&StepReport::skipped>("skipped")
      .def("__str__", py::fn<&StepReport::to_string>)
      .def("__repr__", [](const StepReport& r) { return "<StepReport: " + r.to_string() + ">"; });
  py::class_<AlarmReport>(m, "AlarmReport", "Why on_alarm is called; str() is the message.")
      .def_property_readonly("alarm", [](const AlarmReport& a) { return name_of(a.alarm); })
      .def_readonly<&AlarmReport::scale>("scale")
      .def_readonly<&AlarmReport::skips_in_row>("skips_in_row")
      .def_readonly<&AlarmReport::culprit>("culprit")
      .def("__str__", [](const AlarmReport& a) { return a.sentence; });
}

}  // namespace

// Methods that may wait for a device or for memory release the interpreter lock. on_alarm acquires
// it again: the std::function made of it does that in every call.
void bind_scaler(py::module_& m) {
  bind_reports(m);
  // Of methods that wait for a device: the stream that the step was enqueued on.
  const auto waits = py::arg("stream") = kCurrentStreams;
  // One of two overloads each.
  constexpr StepReport (GradScaler::*kReport)() const = &GradScaler::report;
  constexpr std::optional<StepReport> (GradScaler::*kTryReport)() const = &GradScaler::try_report;
  py::class_<GradScaler>(m, "GradScaler")
      .def_init(py::fn<&make_scaler>)
      .def("set_ranks", py::fn<&set_ranks>)
      .def("loss_scaled", py::fn<&ScalerAccess::loss_scaled>)
      .def("assume_losses", py::fn<&ScalerAccess::assume_losses>)
      .def_property_readonly("round", py::fn<&ScalerAccess::round>)
      .def("gradients_added", py::fn<&ScalerAccess::gradients_added>)
      .def("is_unscaled", py::fn<&ScalerAccess::is_unscaled>)
      .def("move_to_host",
           [](GradScaler& self) {
             const Work work(kCurrentStreams);
             ScalerAccess::move_to_host(self);
           })
      .def("numbers_of", py::fn<&numbers_address>)
      .def("scale_address", py::fn<&scale_address>)
      .def_property_readonly("policy", [](const GradScaler& s) { return s.policy(); })
      .def("set_policy", on_stream<&GradScaler::set_policy>, py::arg("policy"), waits)
      .def_property_readonly("enabled", py::fn<&GradScaler::enabled>)
      .def("get_scale", on_stream<&GradScaler::get_scale>, waits)
      .def("scale", [](GradScaler& self, float loss) { return self.scale(loss); })
      .def("scale_into", with_stream([](GradScaler& self, const TensorView& loss,
                                        const TensorView& scaled) { self.scale(loss, scaled); }))
      .def("unscale_", with_stream([](GradScaler& self, Optimizer& optimizer) {
             return self.unscale_(optimizer);
           }))
      .def("step", py::fn<&step>, py::arg("optimizer"), py::arg("max_norm") = 0.0f,
           py::arg("skip_above_norm") = 0.0f, py::arg("clear_grads") = "on_skip",
           py::arg("stream") = 0, py::arg("external_scale") = 0, py::arg("external_found_inf") = 0)
      .def("report", on_stream<kReport>, waits)
      .def("try_report", on_stream<kTryReport>, waits)
      .def("update", with_stream([](GradScaler& self) { self.update(); }))
      .def("set_scale", with_stream([](GradScaler& self, float scale) {
             ScalerAccess::set_scale(self, scale, "update(new_scale)");
           }))
      .def("retry", on_stream<&GradScaler::retry>, waits)
      .def("discard", on_stream<&GradScaler::discard>, waits)
      .def("save", on_stream<&GradScaler::save>, waits)
      .def("load", on_stream<&GradScaler::load>, py::arg("json"), waits)
      .def("state", with_stream([](const GradScaler& self) { return self.state().save(); }), waits,
           "save(), at any time.");
}

}  // namespace headroom::python
