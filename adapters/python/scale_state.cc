// ScaleState: a policy and its state without a scaler, for frameworks that find overflows
// themselves.

#include <optional>
#include <type_traits>

#include "core/check.h"
#include "decide/transition.h"
#include "decide/verdict.h"
#include "scaler/scaler.h"
#include "tensors.h"

namespace headroom::python {
namespace {

using internal::ScaleStateAccess;

py::dict numbers_of(const ScaleState& state) {
  py::dict numbers;
  internal::visit_numbers(state.policy().rule(), ScaleStateAccess::record(state).numbers,
                          [&](const char* name, const auto& member) { numbers.set(name, member); });
  return numbers;
}

std::string repr_of(py::handle value) {
  return py::object::steal(PyObject_Repr(value.ptr())).cast<std::string>();
}

template <typename T>
T number_from(const char* name, const py::handle& value) {
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    throw Error(ErrorCode::kBadState, std::string("The value of ") + name + ", " + repr_of(value) +
                                          ", is not a number of its type.");
  }
}

// A copy with other numbers. Raises headroom.Error unless a scaler can reach them.
ScaleState with_numbers(const ScaleState& state, const py::kwargs& given) {
  internal::ScaleRecord record = ScaleStateAccess::record(state);
  size_t known = 0;
  internal::visit_numbers(record.policy.rule(), record.numbers,
                          [&](const char* name, auto& member) {
                            if (!given.contains(name)) return;
                            member = number_from<std::decay_t<decltype(member)>>(name, given[name]);
                            ++known;
                          });
  if (known != given.size()) {
    std::string names;
    numbers_of(state).for_each([&](py::handle name, py::handle) {
      names += (names.empty() ? "" : ", ") + name.cast<std::string>();
    });
    throw Error(ErrorCode::kInvalidArgument,
                "The numbers of this policy's state are " + names + "; another name was given.");
  }
  if (given.contains("scale") && !given.contains("pending")) {
    record.numbers.dynamic.pending = record.numbers.scale;
  }
  internal::check_numbers(record.policy, record.numbers);
  return ScaleStateAccess::make(record);
}

std::optional<AlarmReport> advance(ScaleState& state, bool overflow, double amax) {
  const float used = state.scale();
  const Alarm alarm = state.advance({overflow, amax});
  if (alarm == Alarm::kNone) return std::nullopt;
  return internal::alarm_report(state.policy(), alarm, used, state.skips_in_row(), "");
}

}  // namespace

void bind_scale_state(py::module_& m) {
  py::class_<ScaleState>(m, "ScaleState",
                         "A policy, its scale and everything else that changes during training.")
      .def_init(
          [](py::handle policy) {
            return ScaleState(PyUnicode_Check(policy.ptr())
                                  ? parse_policy(policy.cast<std::string>())
                                  : policy.cast<const ScalePolicy&>());
          },
          py::arg("policy"))
      .def_property_readonly("policy", [](const ScaleState& s) { return s.policy(); })
      .def_property_readonly("scale", py::fn<&ScaleState::scale>)
      .def_property_readonly("steps", py::fn<&ScaleState::steps>)
      .def_property_readonly("skipped", py::fn<&ScaleState::skipped>)
      .def_property_readonly("skips_in_row", py::fn<&ScaleState::skips_in_row>)
      .def_property_readonly("numbers", py::fn<&numbers_of>, "Everything that changes, by name.")
      .def("replace", py::fn<&with_numbers>, "A copy with other numbers.")
      .def(
          "applies",
          [](const ScaleState& s, bool finite, double amax) {
            return internal::decide(finite, 0.0, amax, s.scale(), {}).apply();
          },
          py::arg("finite"), py::arg("amax"),
          "Whether a step is applied whose gradients, still scaled, have this largest magnitude.")
      .def("advance", py::fn<&advance>, py::arg("overflow"), py::arg("amax") = 0.0,
           "One update. amax is the largest finite magnitude of the gradients, still scaled; 0 if "
           "it is unknown. Returns an AlarmReport if scaling cannot help, else None.")
      .def("retry", py::fn<&ScaleState::retry>)
      .def("save", py::fn<&ScaleState::save>, "Policy and state as JSON text.")
      .def_static("load", [](const std::string& json) { return ScaleState::load(json); })
      .def("__copy__", [](const ScaleState& s) { return s; })
      .def("__deepcopy__", [](const ScaleState& s, const py::dict&) { return s; })
      .def("__eq__",
           [](const ScaleState& a, py::handle b) {
             return py::is_instance<ScaleState>(b) && a == b.cast<const ScaleState&>();
           })
      .def("__repr__",
           [](const ScaleState& s) {
             return "<ScaleState: scale " + internal::short_number(s.scale()) + ", " +
                    std::to_string(s.steps()) + " steps, " + std::to_string(s.skipped()) +
                    " skipped>";
           })
      .def_pickle([](const ScaleState& s) { return s.save(); },
                  [](const std::string& json) { return ScaleState::load(json); });
}

}  // namespace headroom::python
