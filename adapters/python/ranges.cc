// RangeTable and RangeReport. Enumerators become words. trace.cc fills them.
#include <headroom/ranges.h>

#include "tensors.h"

namespace headroom::python {
namespace {

const char* name_of(RangeSource source) {
  const char* const names[] = {"operation", "input", "parameter", "constant"};
  return names[static_cast<int>(source)];
}

std::vector<RangeRow> rows_near_overflow(const RangeReport& report) {
  std::vector<RangeRow> rows;
  for (const int64_t i : report.near_overflow()) {
    rows.push_back(report.rows()[static_cast<size_t>(i)]);
  }
  return rows;
}

void bind_report(py::module_& m) {
  py::class_<RangeRow>(m, "RangeRow", "A measured tensor and the operation that computed it.")
      .def_readonly<&RangeRow::module>("module", "Name of the module; empty outside of all.")
      .def_readonly<&RangeRow::operation>(
          "operation", "Such as 'mul'; for gradients the operation whose backward computed it.")
      .def_readonly<&RangeRow::tensor>(
          "tensor", "Name of an input or parameter, or what a gradient belongs to.")
      .def_property_readonly(
          "backward", [](const RangeRow& r) { return r.direction == RangeDirection::kBackward; })
      .def_property_readonly(
          "source", [](const RangeRow& r) { return name_of(r.source); },
          "'operation', 'input', 'parameter' or 'constant'.")
      .def_property_readonly("dtype", [](const RangeRow& r) { return to_string(r.dtype); })
      .def_readonly<&RangeRow::inputs>("inputs", "Indices of the rows that it was computed from.")
      .def_property_readonly("stats", [](const RangeRow& r) { return r.stats; })
      .def_property_readonly("finite", [](const RangeRow& r) { return r.stats.finite(); })
      .def("__str__", py::fn<&RangeRow::label>)
      .def("__repr__", [](const RangeRow& r) { return "<RangeRow: " + r.label() + ">"; });
  py::class_<RangeReport>(m, "RangeReport", "What a watched step found; str() is a short table.")
      .def_property_readonly("rows", py::fn<&RangeReport::rows>, "All rows, in program order.")
      .def_property_readonly(
          "first_bad",
          [](const RangeReport& r) {
            if (r.first_bad() < 0) return py::none();
            return py::to_python(r.rows()[static_cast<size_t>(r.first_bad())]);
          },
          "The first row with inf or NaN that were not put there on purpose, or None.")
      .def_property_readonly(
          "inputs_finite",
          [](const RangeReport& r) { return r.first_bad() < 0 || r.inputs_finite(r.first_bad()); },
          "Whether all tensors that first_bad was computed from are finite.")
      .def_property_readonly("near_overflow", py::fn<&rows_near_overflow>,
                             "Rows within 3 doublings of FP16's limit, nearest first.")
      .def("islands", py::fn<&RangeReport::islands>, "Names of the modules to keep in FP32.")
      .def("advice", py::fn<&RangeReport::advice>, "What to do, one sentence each.")
      .def("__str__", py::fn<&RangeReport::to_string>);
}

}  // namespace

void bind_ranges(py::module_& m) {
  py::class_<RangeStats>(m, "RangeStats", "Element counts of a tensor by their fate in FP16.")
      .def_readonly<&RangeStats::count>("count")
      .def_readonly<&RangeStats::zeros>("zeros")
      .def_readonly<&RangeStats::flushed>("flushed", "Nonzero elements that FP16 turns into zero.")
      .def_readonly<&RangeStats::subnormal>("subnormal", "Elements that lose bits in FP16.")
      .def_readonly<&RangeStats::overflow>("overflow", "Finite elements that FP16 turns into inf.")
      .def_readonly<&RangeStats::positive_inf>("positive_inf")
      .def_readonly<&RangeStats::negative_inf>("negative_inf")
      .def_readonly<&RangeStats::nan>("nan")
      .def_readonly<&RangeStats::amax>("amax", "Largest finite magnitude.")
      .def_property_readonly("finite", py::fn<&RangeStats::finite>)
      .def_property_readonly("headroom_bits", py::fn<&RangeStats::headroom_bits>,
                             "Doublings of amax until FP16 overflows.");
  bind_report(m);
  py::class_<RangeTable>(m, "RangeTable")
      .def_constructor<int64_t>()
      .def("prepare", with_stream([](RangeTable& self, int device) {
             self.prepare({DeviceType::kCUDA, device});
           }))
      .def("begin", with_stream([](RangeTable& self) { self.begin(); }))
      .def("measure",
           [](RangeTable& self, const TensorView& tensor, uintptr_t stream) {
             const StreamScope scope(stream_from(stream));
             return self.measure(tensor);
           })
      .def("finish", with_stream([](RangeTable& self) { self.finish(); }))
      .def("ready", py::fn<&RangeTable::ready>);
}

}  // namespace headroom::python
