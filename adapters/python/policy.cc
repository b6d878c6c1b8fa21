// ScalePolicy. All settings come from the list in src/decide/settings.h; none is named here except
// on_overflow, whose values are words in Python.
#include <headroom/policy.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "decide/settings.h"
#include "tensors.h"

namespace headroom::python {
namespace {

py::object to_python(OnOverflow value) {
  return py::str(value == OnOverflow::kThrow ? "throw" : "skip");
}
template <typename T>
py::object to_python(const T& value) {
  return py::cast(value);
}

double from_python(const py::handle& value) {
  if (!py::isinstance<py::str>(value)) return value.cast<double>();
  const auto word = value.cast<std::string>();
  if (word == "skip" || word == "throw") return word == "throw" ? 1.0 : 0.0;
  throw py::value_error("on_overflow is '" + word + "'; it must be 'skip' or 'throw'.");
}

// A setting as a Python attribute. Raises AttributeError if the policy's rule does not have it.
py::object get(const ScalePolicy& policy, const std::string& name) {
  py::object found;
  PolicySettings::visit(policy, [&](const Setting& setting, const auto& member) {
    if (name == setting.name) found = to_python(member);
  });
  if (!found)
    throw py::attribute_error("a policy of rule '" + std::string(to_string(policy.rule())) +
                              "' has no setting '" + name + "'");
  return found;
}

// A copy with other settings. Raises headroom.Error for an unknown name or a bad value.
ScalePolicy with_settings(ScalePolicy policy, const py::kwargs& settings) {
  for (const auto& [name, value] : settings) {
    policy.set(name.cast<std::string>(), from_python(value));
  }
  validate(policy);
  return policy;
}

// The function that creates a policy of one rule: DynamicScale(growth_interval=500).
template <typename Rule>
void bind_rule(py::module_& m, const char* name, const char* doc) {
  m.def(
      name, [](const py::kwargs& settings) { return with_settings(Rule{}, settings); }, doc);
}

}  // namespace

void bind_policy(py::module_& m) {
  py::class_<ScalePolicy>(m, "ScalePolicy",
                          "How the scale changes: one of three rules, with its settings as "
                          "attributes; see docs/policies.md.")
      .def(py::init(&parse_policy), py::arg("text"),
           "A preset and settings that differ from it: 'torch:growth_interval=500'.")
      .def_property_readonly("rule", [](const ScalePolicy& p) { return to_string(p.rule()); })
      .def("replace", &with_settings, "A copy with other settings.")
      .def("__getattr__", &get)
      .def("__eq__",
           [](const ScalePolicy& a, const ScalePolicy& b) { return to_string(a) == to_string(b); })
      .def("__str__", py::overload_cast<const ScalePolicy&>(&to_string))
      .def("__repr__", [](const ScalePolicy& p) { return "ScalePolicy('" + to_string(p) + "')"; });
  bind_rule<StaticScale>(m, "StaticScale", "A constant scale.");
  bind_rule<DynamicScale>(m, "DynamicScale", "The rule of torch.amp.GradScaler and its variants.");
  bind_rule<HeadroomScale>(m, "HeadroomScale",
                           "Headroom's own rule: the scale follows the largest gradient.");
  m.def("preset", &preset);
  m.def("presets", [] {
    py::dict all;
    for (const PresetInfo& info : presets()) all[info.name] = info.summary;
    return all;
  });
}

}  // namespace headroom::python
