// Recorder, write_report() and advise().
#include <headroom/inspect.h>
#include <headroom/record.h>
#include <pybind11/stl.h>

#include <utility>

#include "tensors.h"

namespace headroom::python {
namespace {

using Settings = std::vector<std::pair<std::string, std::string>>;

Format format_named(const std::string& name) {
  for (const Format format : {Format::kFP16, Format::kBF16, Format::kE5M2, Format::kE4M3}) {
    if (name == limits(format).name) return format;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "There is no format '" + name + "'; use fp16, bf16, e5m2 or e4m3.");
}

const char* name_of(ScaleAdvice::Verdict verdict) {
  const char* const names[] = {"nothing", "unneeded", "scale", "none fits"};
  return names[static_cast<int>(verdict)];
}

void bind_recorder(py::module_& m) {
  using Layer = std::tuple<std::string, GradStats, GradDetail>;
  py::class_<Recorder>(m, "Recorder")
      .def(
          py::init([](const std::string& folder, std::string name, std::string group,
                      const ScalePolicy& policy, Settings settings, bool tensorboard, bool resume) {
            return Recorder(folder, {std::move(name), std::move(group), policy, std::move(settings),
                                     tensorboard, resume});
          }))
      .def("step", &Recorder::step)
      .def("layers",
           [](Recorder& self, int64_t step, double scale, std::vector<Layer> layers) {
             std::vector<LayerStats> stats;
             for (Layer& layer : layers) {
               auto& [name, measured, detail] = layer;
               stats.push_back({std::move(name), measured, detail});
             }
             self.layers(step, scale, stats);
           })
      .def("note", &Recorder::note)
      .def("rewind", &Recorder::rewind)
      .def("finish", &Recorder::finish);
  m.def("write_report", [](const std::string& folder, const std::string& path) {
    std::vector<std::string> left_out;
    write_report(folder, path, &left_out);
    return left_out;
  });
}

}  // namespace

void bind_tools(py::module_& m) {
  bind_recorder(m);
  py::class_<ScaleAdvice>(m, "ScaleAdvice", "A recommendation for a static scale.")
      .def_property_readonly(
          "verdict", [](const ScaleAdvice& a) { return name_of(a.verdict); },
          "'scale', 'unneeded', 'none fits' or 'nothing'.")
      .def_readonly("scale", &ScaleAdvice::scale, "A power of two.")
      .def_readonly("lowest", &ScaleAdvice::lowest,
                    "From here to `highest` nothing overflows and little is lost; 0 if nowhere.")
      .def_readonly("highest", &ScaleAdvice::highest)
      .def_property_readonly(
          "flushed", [](const ScaleAdvice& a) { return a.outcome.flushed; },
          "Gradients that become zero at `scale`.")
      .def_property_readonly(
          "subnormal", [](const ScaleAdvice& a) { return a.outcome.subnormal; },
          "Gradients that lose bits at `scale`.")
      .def("__str__", [](const ScaleAdvice& a) { return a.reason; })
      .def("__repr__", [](const ScaleAdvice& a) { return "<ScaleAdvice: " + a.reason + ">"; });
  py::class_<Magnitudes>(m, "Magnitudes")
      .def(py::init<>())
      .def("add",
           [](Magnitudes& self, py::handle grad) {
             const TensorView view = view_of(grad);
             const Work work(0);
             self.add(view);
           })
      .def("advise",
           [](const Magnitudes& self, const std::string& format, double lose, int margin) {
             return advise(self, {format_named(format), lose, margin});
           });
}

}  // namespace headroom::python
