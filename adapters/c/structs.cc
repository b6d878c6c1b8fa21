#include "adapters/c/structs.h"

#include <algorithm>

namespace headroom::c {
namespace {

// A number of C as an enumerator, if there is one for it.
template <typename Enum>
Enum enum_from(int32_t value, Enum last, const char* name) {
  if (value < 0 || value > static_cast<int32_t>(last)) {
    throw Failure{HR_ERROR_INVALID_ARGUMENT,
                  "'" + std::string(name) + "' is " + std::to_string(value) +
                      "; use one of the constants of headroom/c.h, 0 to " +
                      std::to_string(static_cast<int32_t>(last)) + "."};
  }
  return static_cast<Enum>(value);
}

template <typename T>
void check_list(const T* list, size_t count, const char* name) {
  if (count > 0) need(list, name);
}

}  // namespace

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

hr_tensor tensor_from(const TensorView& view) {
  return {view.data,
          view.count,
          static_cast<int32_t>(view.dtype),
          static_cast<int32_t>(view.device.type),
          view.device.index,
          view.read_only};
}

std::vector<TensorView> views_from(const hr_tensor* tensors, size_t count) {
  check_list(tensors, count, "tensors");
  std::vector<TensorView> views;
  views.reserve(count);
  for (size_t i = 0; i < count; ++i) views.push_back(view_from(tensors[i]));
  return views;
}

std::vector<Parameter> parameters_from(const hr_parameter* parameters, size_t count) {
  check_list(parameters, count, "parameters");
  std::vector<Parameter> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const hr_parameter& parameter = parameters[i];
    list.push_back({parameter.name != nullptr ? parameter.name : "", view_from(parameter.weight),
                    view_from(parameter.grad)});
  }
  return list;
}

hr_parameter parameter_from(const Parameter& parameter) {
  return {parameter.name.c_str(), tensor_from(parameter.weight), tensor_from(parameter.grad)};
}

StepOptions step_options_from(const hr_step_options* options) {
  hr_step_options defaults = {};
  defaults.size = sizeof(defaults);
  const hr_step_options given = taken(options, defaults, "options");
  StepOptions step;
  step.max_norm = given.max_norm;
  step.skip_above_norm = given.skip_above_norm;
  step.clear_grads = enum_from(given.clear_grads, ClearGrads::kNever, "clear_grads");
  if (given.stream != nullptr) step.stream = given.stream;
  return step;
}

hr_report report_from(const StepReport& report) {
  hr_report out = {};
  out.size = sizeof(out);
  out.pending = report.pending;
  out.applied = report.applied;
  out.skip = static_cast<int32_t>(report.skip);
  out.scale = report.scale;
  out.grad_norm = report.grad_norm;
  out.clip_factor = report.clip_factor;
  out.steps = report.steps;
  out.skipped = report.skipped;
  out.count = report.stats.count;
  out.inf_count = report.stats.inf_count;
  out.nan_count = report.stats.nan_count;
  out.amax = report.stats.amax;
  out.norm = report.stats.norm();
  out.culprit = report.stats.culprit;
  out.culprit_inf = report.stats.culprit_inf;
  out.culprit_nan = report.stats.culprit_nan;
  copy_cut(report.culprit, out.culprit_text, sizeof(out.culprit_text));
  return out;
}

hr_stats stats_from(const GradStats& stats, const GradDetail& detail) {
  static_assert(HR_HISTOGRAM_BINS == GradDetail::kBins);
  static_assert(HR_HISTOGRAM_MIN_EXPONENT == GradDetail::kMinExponent);
  hr_stats out = {};
  out.size = sizeof(out);
  out.count = stats.count;
  out.inf_count = stats.inf_count;
  out.nan_count = stats.nan_count;
  out.amax = stats.amax;
  out.norm = stats.norm();
  out.culprit = stats.culprit;
  out.culprit_inf = stats.culprit_inf;
  out.culprit_nan = stats.culprit_nan;
  out.zeros = detail.zeros;
  out.subnormals = detail.subnormals;
  std::copy(detail.histogram.begin(), detail.histogram.end(), out.histogram);
  return out;
}

hr_unscale_result unscale_result_from(const GradStats& result) {
  return {sizeof(hr_unscale_result), result.inf_count, result.nan_count, result.new_inf,
          result.new_zeros,          result.culprit,   result.norm()};
}

}  // namespace headroom::c
