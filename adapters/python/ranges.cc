// RangeTable and RangeReport. Enumerators become words. trace.cc fills them.
#include <headroom/ranges.h>
#include <pybind11/stl.h>

#include <string>

#include "tensors.h"

namespace headroom::python {
namespace {

const char* name_of(RangeSource source) {
  const char* const names[] = {"operation", "input", "parameter", "constant"};
  return names[static_cast<int>(source)];
}

void bind_report(py::module_& m) {
  py::class_<RangeRow>(m, "RangeRow", "A measured tensor and the operation that computed it.")
      .def_readonly("module", &RangeRow::module, "Name of the module; empty outside of all.")
      .def_readonly("operation", &RangeRow::operation,
                    "Such as 'mul'; for gradients the operation whose backward computed it.")
      .def_readonly("tensor", &RangeRow::tensor,
                    "Name of an input or parameter, or what a gradient belongs to.")
      .def_property_readonly(
          "backward", [](const RangeRow& r) { return r.direction == RangeDirection::kBackward; })
      .def_property_readonly(
          "source", [](const RangeRow& r) { return name_of(r.source); },
          "'operation', 'input', 'parameter' or 'constant'.")
      .def_property_readonly("dtype", [](const RangeRow& r) { return to_string(r.dtype); })
      .def_readonly("inputs", &RangeRow::inputs, "Indices of the rows that it was computed from.")
      .def_property_readonly("stats", [](const RangeRow& r) { return r.stats; })
      .def_property_readonly("finite", [](const RangeRow& r) { return r.stats.finite(); })
      .def("__str__", &RangeRow::label)
      .def("__repr__", [](const RangeRow& r) { return "<RangeRow: " + r.label() + ">"; });
  const auto rows_at = [](const RangeReport& report, const std::vector<int64_t>& indices) {
    std::vector<RangeRow> rows;
    for (const int64_t i : indices) rows.push_back(report.rows()[static_cast<size_t>(i)]);
    return rows;
  };
  py::class_<RangeReport>(m, "RangeReport", "What a watched step found; str() is a short table.")
      .def_property_readonly("rows", &RangeReport::rows, "All rows, in program order.")
      .def_property_readonly(
          "first_bad",
          [](const RangeReport& r) -> py::object {
            if (r.first_bad() < 0) return py::none();
            return py::cast(r.rows()[static_cast<size_t>(r.first_bad())]);
          },
          "The first row with inf or NaN that were not put there on purpose, or None.")
      .def_property_readonly(
          "inputs_finite",
          [](const RangeReport& r) { return r.first_bad() < 0 || r.inputs_finite(r.first_bad()); },
          "Whether all tensors that first_bad was computed from are finite.")
      .def_property_readonly(
          "near_overflow",
          [rows_at](const RangeReport& r) { return rows_at(r, r.near_overflow()); },
          "Rows within 3 doublings of FP16's limit, nearest first.")
      .def("islands", &RangeReport::islands, "Names of the modules to keep in FP32.")
      .def("advice", &RangeReport::advice, "What to do, one sentence each.")
      .def("__str__", &RangeReport::to_string);
}

}  // namespace

void bind_ranges(py::module_& m) {
  py::class_<RangeStats>(m, "RangeStats", "Element counts of a tensor by their fate in FP16.")
      .def_readonly("count", &RangeStats::count)
      .def_readonly("zeros", &RangeStats::zeros)
      .def_readonly("flushed", &RangeStats::flushed, "Nonzero elements that FP16 turns into zero.")
      .def_readonly("subnormal", &RangeStats::subnormal, "Elements that lose bits in FP16.")
      .def_readonly("overflow", &RangeStats::overflow, "Finite elements that FP16 turns into inf.")
      .def_readonly("positive_inf", &RangeStats::positive_inf)
      .def_readonly("negative_inf", &RangeStats::negative_inf)
      .def_readonly("nan", &RangeStats::nan)
      .def_readonly("amax", &RangeStats::amax, "Largest finite magnitude.")
      .def_property_readonly("finite", &RangeStats::finite)
      .def_property_readonly("headroom_bits", &RangeStats::headroom_bits,
                             "Doublings of amax until FP16 overflows.");
  bind_report(m);
  py::class_<RangeTable>(m, "RangeTable")
      .def(py::init<int64_t>())
      .def("prepare",
           [](RangeTable& self, int device, uintptr_t stream) {
             const Work work(stream);
             self.prepare({DeviceType::kCUDA, device});
           })
      .def("begin",
           [](RangeTable& self, uintptr_t stream) {
             const Work work(stream);
             self.begin();
           })
      .def("measure",
           [](RangeTable& self, py::handle tensor, uintptr_t stream) {
             const StreamScope scope(stream_from(stream));
             return self.measure(view_of(tensor));
           })
      .def("finish",
           [](RangeTable& self, uintptr_t stream) {
             const Work work(stream);
             self.finish();
           })
      .def("ready", &RangeTable::ready);
}

}  // namespace headroom::python
