#include "adapters/c/structs.h"

#include <algorithm>
#include <type_traits>

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

// Every setting but on_overflow, from one side to the other. Questions are bool here and int32_t
// there.
template <typename From, typename To>
void copy_policy(const From& from, To* to) {
  const auto copy = [](const auto& value, auto* place) {
    *place = static_cast<std::remove_pointer_t<decltype(place)>>(value);
  };
  copy(from.growth_factor, &to->growth_factor);
  copy(from.backoff_factor, &to->backoff_factor);
  copy(from.tolerance, &to->tolerance);
  copy(from.grad_limit, &to->grad_limit);
  copy(from.peak_window, &to->peak_window);
  copy(from.retry_interval, &to->retry_interval);
  copy(from.rerun, &to->rerun);
  copy(from.max_skips_in_row, &to->max_skips_in_row);
  copy(from.init_scale, &to->init_scale);
  copy(from.min_scale, &to->min_scale);
  copy(from.max_scale, &to->max_scale);
  copy(from.dynamic, &to->dynamic);
  copy(from.growth_interval, &to->growth_interval);
  copy(from.first_growth_extra, &to->first_growth_extra);
  copy(from.next_growth_extra, &to->next_growth_extra);
  copy(from.hysteresis, &to->hysteresis);
  copy(from.refill_on_growth, &to->refill_on_growth);
  copy(from.refill_on_clean, &to->refill_on_clean);
  copy(from.refill_on_shrink, &to->refill_on_shrink);
  copy(from.late, &to->late);
  copy(from.stay_above_min, &to->stay_above_min);
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

hr_policy policy_from(const ScalePolicy& policy) {
  hr_policy out = {};
  out.size = sizeof(out);
  copy_policy(policy, &out);
  out.on_overflow = static_cast<int32_t>(policy.on_overflow);
  return out;
}

ScalePolicy policy_from(const hr_policy& policy) {
  ScalePolicy out;
  copy_policy(policy, &out);
  out.on_overflow = enum_from(policy.on_overflow, OnOverflow::kThrow, "on_overflow");
  return out;
}

StepOptions step_options_from(const hr_step_options* options) {
  const hr_step_options given = taken(options, {sizeof(given), 0.0f, HR_CLEAR_ON_SKIP}, "options");
  return {given.max_norm, enum_from(given.clear_grads, ClearGrads::kNever, "clear_grads")};
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

hr_stats stats_from(const GradStats& stats) {
  static_assert(HR_HISTOGRAM_BINS == GradDetail::kMaxExponent - GradDetail::kMinExponent + 1);
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
  out.zeros = stats.detail.zeros;
  out.subnormals = stats.detail.subnormals;
  std::copy(stats.detail.histogram.begin(), stats.detail.histogram.end(), out.histogram);
  return out;
}

hr_unscale_result unscale_result_from(const UnscaleResult& result) {
  return {
      sizeof(hr_unscale_result), result.before.inf_count, result.before.nan_count, result.new_inf,
      result.new_zeros,          result.before.culprit,   result.before.norm()};
}

}  // namespace headroom::c
