// Recorder, write_report(), diagnose(), advise() and inspect().
#include <headroom/diagnose.h>
#include <headroom/error.h>
#include <headroom/inspect.h>
#include <headroom/record.h>
#include <headroom/weights.h>

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
      .def_init([](const std::string& folder, std::string name, std::string group,
                   const ScalePolicy& policy, Settings settings, bool tensorboard, bool resume) {
        return Recorder(folder, {std::move(name), std::move(group), policy, std::move(settings),
                                 tensorboard, resume});
      })
      .def("step", py::fn<&Recorder::step>)
      .def("layers",
           [](Recorder& self, int64_t step, double scale, const std::vector<Layer>& layers) {
             std::vector<LayerStats> stats;
             for (const Layer& layer : layers) {
               const auto& [name, measured, detail] = layer;
               stats.push_back({name, measured, detail});
             }
             self.layers(step, scale, stats);
           })
      .def("note", py::fn<&Recorder::note>)
      .def("settings", py::fn<&Recorder::settings>)
      .def("rewind", py::fn<&Recorder::rewind>)
      .def("finish", py::fn<&Recorder::finish>);
  m.def("write_report", [](const std::string& folder, const std::string& path) {
    std::vector<std::string> left_out;
    write_report(folder, path, &left_out);
    return left_out;
  });
}

void bind_diagnose(py::module_& m) {
  py::class_<Finding>(m, "Finding", "What one rule has found in a run.")
      .def_readonly<&Finding::rule>("rule")
      .def_readonly<&Finding::problem>("problem", "One sentence, with the evidence.")
      .def_readonly<&Finding::change>("change", "One sentence.")
      .def_readonly<&Finding::command>("command", "The option of headroom train, or empty.")
      .def_readonly<&Finding::code>("code", "The line of Python, or empty.")
      .def("__repr__",
           [](const Finding& f) { return "<Finding " + f.rule + ": " + f.change + ">"; });
  py::class_<Diagnosis>(m, "Diagnosis", "Advice on a run, the most important first. Print it.")
      .def_readonly<&Diagnosis::place>("place")
      .def_readonly<&Diagnosis::name>("name")
      .def_readonly<&Diagnosis::findings>("findings")
      .def_readonly<&Diagnosis::summary>("summary")
      .def("__str__", [](const Diagnosis& d) { return d.to_string(); })
      .def("__repr__", [](const Diagnosis& d) { return "<Diagnosis: " + d.summary + ">"; });
  m.def("diagnose", [](const std::string& folder) { return diagnose(folder); });
}

void bind_weight_tensor(py::module_& m) {
  py::class_<WeightTensor>(m, "WeightTensor",
                           "One tensor of weights, and what a conversion to FP16 does to it.")
      .def_readonly<&WeightTensor::file>("file")
      .def_readonly<&WeightTensor::name>("name")
      .def_property_readonly("dtype", [](const WeightTensor& t) { return to_string(t.dtype); })
      .def_readonly<&WeightTensor::shape>("shape")
      .def_readonly<&WeightTensor::count>("count")
      .def_readonly<&WeightTensor::zeros>("zeros")
      .def_readonly<&WeightTensor::infs>("infs")
      .def_readonly<&WeightTensor::nans>("nans")
      .def_readonly<&WeightTensor::largest>("largest", "Magnitude of the finite weights.")
      .def_readonly<&WeightTensor::smallest>("smallest", "Likewise, without zeros.")
      .def_property_readonly(
          "flushed", [](const WeightTensor& t) { return t.fp16.flushed; },
          "Weights that become zero.")
      .def_property_readonly(
          "subnormal", [](const WeightTensor& t) { return t.fp16.subnormal; },
          "Weights that lose some of their bits.")
      .def_property_readonly(
          "overflow", [](const WeightTensor& t) { return t.fp16.overflow; },
          "Weights that become inf.")
      .def("__repr__", [](const WeightTensor& t) { return "<WeightTensor " + t.name + ">"; });
}

void bind_weights(py::module_& m) {
  bind_weight_tensor(m);
  py::class_<WeightReport>(m, "WeightReport", "Whether weights are safe in FP16. Print it.")
      .def_readonly<&WeightReport::safe>("safe")
      .def_readonly<&WeightReport::complete>(
          "complete", "False if a floating-point tensor was left out because of its type.")
      .def_readonly<&WeightReport::verdict>("verdict", "One sentence.")
      .def_readonly<&WeightReport::tensors>("tensors")
      .def_readonly<&WeightReport::total>("total")
      .def_readonly<&WeightReport::keep_fp32>(
          "keep_fp32", "Names of the tensors that FP16 damages, the worst first.")
      .def_readonly<&WeightReport::lose>("lose")
      .def_property_readonly(
          "left_out",
          [](const WeightReport& report) {
            std::vector<std::tuple<std::string, std::string, std::string>> list;
            for (const auto& left : report.left_out) {
              list.emplace_back(left.file, left.name, left.dtype);
            }
            return list;
          },
          "(file, name, type) of tensors that were not inspected.")
      .def("to_string", py::fn<&WeightReport::to_string>, py::arg("width") = 80,
           py::arg("all") = false)
      .def("__str__", [](const WeightReport& report) { return report.to_string(); })
      .def("__repr__",
           [](const WeightReport& report) { return "<WeightReport: " + report.verdict + ">"; });
  py::class_<WeightInspector>(m, "WeightInspector")
      .def_constructor<double>()
      .def("add",
           [](WeightInspector& self, const std::string& name, const TensorView& weights,
              std::vector<int64_t> shape) {
             const Work work(kCurrentStreams);
             self.add(name, weights, std::move(shape));
           })
      .def("leave_out", py::fn<&WeightInspector::leave_out>)
      .def("add_files",
           [](WeightInspector& self, const std::vector<std::string>& paths) {
             const Work work(0);
             self.add_files(paths);
           })
      .def("finish", py::fn<&WeightInspector::finish>);
}

}  // namespace

void bind_tools(py::module_& m) {
  bind_recorder(m);
  bind_diagnose(m);
  bind_weights(m);
  py::class_<ScaleAdvice>(m, "ScaleAdvice", "A recommendation for a static scale.")
      .def_property_readonly(
          "verdict", [](const ScaleAdvice& a) { return name_of(a.verdict); },
          "'scale', 'unneeded', 'none fits' or 'nothing'.")
      .def_readonly<&ScaleAdvice::scale>("scale", "A power of two.")
      .def_readonly<&ScaleAdvice::lowest>(
          "lowest", "From here to `highest` nothing overflows and little is lost; 0 if nowhere.")
      .def_readonly<&ScaleAdvice::highest>("highest")
      .def_property_readonly(
          "flushed", [](const ScaleAdvice& a) { return a.outcome.flushed; },
          "Gradients that become zero at `scale`.")
      .def_property_readonly(
          "subnormal", [](const ScaleAdvice& a) { return a.outcome.subnormal; },
          "Gradients that lose bits at `scale`.")
      .def("__str__", [](const ScaleAdvice& a) { return a.reason; })
      .def("__repr__", [](const ScaleAdvice& a) { return "<ScaleAdvice: " + a.reason + ">"; });
  py::class_<Magnitudes>(m, "Magnitudes")
      .def_constructor<>()
      .def("add",
           [](Magnitudes& self, const TensorView& grad) {
             const Work work(0);
             self.add(grad);
           })
      .def("advise",
           [](const Magnitudes& self, const std::string& format, double lose, int margin) {
             return advise(self, {format_named(format), lose, margin});
           });
}

}  // namespace headroom::python
