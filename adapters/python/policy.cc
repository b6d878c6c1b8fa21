// ScalePolicy. All settings come from the list in src/decide/settings.h; none is named here except
// on_overflow, whose values are words in Python.
#include <headroom/policy.h>

#include "decide/settings.h"
#include "tensors.h"

namespace headroom::python {
namespace {

py::object to_python(OnOverflow value) { return py::to_python(word_of(value)); }
template <typename T>
py::object to_python(const T& value) {
  return py::to_python(value);
}

double from_python(py::handle value) {
  if (!PyUnicode_Check(value.ptr())) return value.cast<double>();
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

bool is_same(const ScalePolicy& policy, py::handle other) {
  return py::is_instance<ScalePolicy>(other) &&
         to_string(policy) == to_string(other.cast<const ScalePolicy&>());
}

// A copy with other settings. Raises headroom.Error for an unknown name or a bad value.
ScalePolicy with_settings(ScalePolicy policy, const py::kwargs& settings) {
  settings.for_each([&](py::handle name, py::handle value) {
    policy.set(name.cast<std::string>(), from_python(value));
  });
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
      .def_init(py::fn<&parse_policy>, py::arg("text"),
                "A preset and settings that differ from it: 'torch:growth_interval=500'.")
      .def_property_readonly("rule", [](const ScalePolicy& p) { return to_string(p.rule()); })
      .def("replace", py::fn<&with_settings>, "A copy with other settings.")
      .def("__getattr__", py::fn<&get>)
      .def("__eq__", [](const ScalePolicy& a, py::handle b) { return is_same(a, b); })
      .def("__str__", [](const ScalePolicy& p) { return to_string(p); })
      .def("__repr__", [](const ScalePolicy& p) { return "ScalePolicy('" + to_string(p) + "')"; });
  bind_rule<StaticScale>(m, "StaticScale", "A constant scale.");
  bind_rule<DynamicScale>(m, "DynamicScale", "The rule of torch.amp.GradScaler and its variants.");
  bind_rule<HeadroomScale>(m, "HeadroomScale",
                           "Headroom's own rule: the scale follows the largest gradient.");
  m.def("preset", py::fn<&preset>, py::arg("name"), "The policy of a preset.");
  m.def(
      "presets",
      [] {
        py::dict all;
        for (const PresetInfo& info : presets()) all.set(info.name, info.summary);
        return all;
      },
      "All presets: what each is for, by name.");
}

}  // namespace headroom::python
