// Conversion between the structs of the C API and the C++ types.
#include "adapters/c/structs.h"

namespace headroom::c {
namespace {

// Converts `count` elements; the list may be null if there are none.
template <typename To, typename From>
std::vector<To> convert_list(const From* list, size_t count, const char* name,
                             To (*convert)(const From&)) {
  if (count > 0) require(list, name);
  std::vector<To> converted;
  converted.reserve(count);  // throws for a count that no memory can hold, before reading the list
  for (size_t i = 0; i < count; ++i) converted.push_back(convert(list[i]));
  return converted;
}

Parameter parameter_from(const hr_parameter& parameter) {
  return {parameter.name != nullptr ? parameter.name : "", view_from(parameter.weight),
          view_from(parameter.grad)};
}

}  // namespace

// The enumerators of C have the values of the C++ ones; enum_from() checks the range.
Device device_from(int32_t type, int32_t index) {
  return {enum_from(type, DeviceType::kCUDA, "device_type"), index};
}

TensorView view_from(const hr_tensor& tensor) {
  TensorView view;
  view.data = tensor.data;
  view.dtype = enum_from(tensor.dtype, DType::kF64, "dtype");
  view.count = tensor.count;
  view.device = device_from(tensor.device_type, tensor.device_index);
  view.read_only = tensor.read_only != 0;
  return view;
}

hr_tensor c_tensor(const TensorView& view) {
  return {view.data,
          view.count,
          static_cast<int32_t>(view.dtype),
          static_cast<int32_t>(view.device.type),
          view.device.index,
          view.read_only};
}

std::vector<TensorView> views_from(const hr_tensor* tensors, size_t count) {
  return convert_list(tensors, count, "tensors", &view_from);
}

std::vector<Parameter> parameters_from(const hr_parameter* parameters, size_t count) {
  return convert_list(parameters, count, "parameters", &parameter_from);
}

// Null options, and a struct of zeros, are the defaults of C++. A null stream stays unset, so that
// the stream of hr_set_stream() is used.
StepOptions step_options_from(const hr_step_options* options) {
  const hr_step_options given = read_struct(options, {}, "options");
  StepOptions step;
  step.max_norm = given.max_norm;
  step.skip_above_norm = given.skip_above_norm;
  step.clear_grads = enum_from(given.clear_grads, ClearGrads::kNever, "clear_grads");
  if (given.stream != nullptr) step.stream = given.stream;
  return step;
}

// The norm is computed here: C has no methods. Squares and ranks are not exported.
hr_stats c_stats(const GradStats& stats) {
  hr_stats out = {};
  out.count = stats.count;
  out.inf_count = stats.inf_count;
  out.nan_count = stats.nan_count;
  out.amax = stats.amax;
  out.norm = stats.norm();
  out.culprit = stats.culprit;
  out.culprit_inf = stats.culprit_inf;
  out.culprit_nan = stats.culprit_nan;
  out.new_inf = stats.new_inf;
  out.new_zeros = stats.new_zeros;
  return out;
}

// hr_report has a fixed size, so the culprit's name is truncated; stats.culprit is its index.
hr_report c_report(const StepReport& report) {
  hr_report out = {};
  out.pending = report.pending;
  out.applied = report.applied;
  out.skip = static_cast<int32_t>(report.skip);
  out.scale = report.scale;
  out.grad_norm = report.grad_norm;
  out.clip_factor = report.clip_factor;
  out.steps = report.steps;
  out.skipped = report.skipped;
  out.stats = c_stats(report.stats);
  copy_truncated(report.culprit, out.culprit_text, sizeof(out.culprit_text));
  return out;
}

}  // namespace headroom::c
