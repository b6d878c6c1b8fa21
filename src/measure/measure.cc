// measure() and unscale_(): checks, division of the list among threads and devices, and merging.
#include <headroom/measure.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/check.h"
#include "core/float_environment.h"
#include "core/parallel.h"
#include "measure/bound.h"
#include "measure/cuda.h"
#include "measure/kernels.h"
#include "measure/stats.h"

namespace headroom {
namespace internal {
namespace {

// The ranges depend on the list alone, and their results are merged in the order of the list.
// Therefore the number of threads does not change the result.
struct Plan {
  std::vector<Range> ranges;
  size_t bytes = 0;
};

// Large tensors are cut into ranges; several small tensors of one type share a range.
Plan make_plan(const std::vector<TensorView>& grads) {
  Plan plan;
  Range range{};     // the range that is being filled,
  DType dtype{};     // its element type,
  int64_t room = 0;  // and how many more elements fit into it
  const auto close = [&] {
    if (room == 0 && range.last_end == 0) return;  // nothing yet
    plan.ranges.push_back(range);
    plan.bytes += static_cast<size_t>(kRangeElements - room) * size_of(dtype);
  };
  for (size_t i = 0; i < grads.size(); ++i) {
    const TensorView& grad = grads[i];
    if (grad.dtype == dtype && grad.count > 0 && grad.count <= room) {
      range.last = i;
      range.last_end = grad.count;
      room -= grad.count;
      continue;
    }
    for (int64_t begin = 0; begin < grad.count; begin += kRangeElements) {
      close();
      const int64_t end = std::min(grad.count, begin + kRangeElements);
      range = {i, begin, i, end};
      room = kRangeElements - (end - begin);
      dtype = grad.dtype;
    }
  }
  close();
  return plan;
}

void merge_detail(const GradDetail& part, GradDetail* whole) {
  whole->zeros += part.zeros;
  whole->subnormals += part.subnormals;
  for (size_t i = 0; i < part.histogram.size(); ++i) whole->histogram[i] += part.histogram[i];
}

GradStats run_on_cpu(const std::vector<TensorView>& grads, const MeasureJob& job,
                     GradDetail* detail) {
  const DefaultFloatEnvironment environment;
  const Plan plan = make_plan(grads);
  std::vector<GradStats> parts(plan.ranges.size());
  std::vector<GradDetail> details(detail != nullptr ? parts.size() : 0);
  parallel_for(plan.ranges.size(), plan.bytes, [&](size_t i) {
    const Range& range = plan.ranges[i];
    const MeasureFunction function = measure_function(grads[range.first].dtype);
    function(grads.data(), range, job, &parts[i], detail != nullptr ? &details[i] : nullptr);
  });
  GradStats whole;
  for (const GradStats& part : parts) merge(part, &whole);
  for (const GradDetail& part : details) merge_detail(part, detail);
  return whole;
}

// Measures the tensors of each device separately. The culprit is the first one in the whole list.
GradStats run_on_devices(const std::vector<TensorView>& grads, const MeasureJob& job,
                         GradDetail* detail) {
  std::map<int, std::vector<size_t>> by_device;  // -1 for the CPU
  for (size_t i = 0; i < grads.size(); ++i) {
    const bool cuda = grads[i].device.type == DeviceType::kCUDA;
    by_device[cuda ? grads[i].device.index : -1].push_back(i);
  }
  GradStats whole;
  for (const auto& [device, indices] : by_device) {
    std::vector<TensorView> list;
    for (const size_t i : indices) list.push_back(grads[i]);
    GradStats part = device < 0 ? run_on_cpu(list, job, detail) : cuda_measure(list, job, detail);
    if (part.culprit >= 0) {
      part.culprit = static_cast<int64_t>(indices[static_cast<size_t>(part.culprit)]);
    }
    merge(part, &whole);
  }
  return whole;
}

GradStats run(const std::vector<TensorView>& grads, const MeasureJob& job, GradDetail* detail) {
  const bool cuda = std::any_of(grads.begin(), grads.end(), [](const TensorView& grad) {
    return grad.device.type == DeviceType::kCUDA;
  });
  if (detail != nullptr) *detail = GradDetail{};
  return cuda ? run_on_devices(grads, job, detail) : run_on_cpu(grads, job, detail);
}

void check_views(const std::vector<TensorView>& grads, Access access) {
  const bool cuda = cuda_loaded();  // asking for each view would take as long as to measure a few
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto name = [i] { return "Gradient " + std::to_string(i); };
    check_form(grads[i], access, name);
    if (cuda || grads[i].device.type != DeviceType::kCPU) check_memory(grads[i], name);
  }
}

// Throws if two gradients share memory: it would be unscaled twice, by two threads at a time.
void check_apart(const std::vector<TensorView>& grads) {
  std::vector<const TensorView*> views;
  for (const TensorView& grad : grads) views.push_back(&grad);
  const auto shared = find_overlap(views);
  require(!shared, ErrorCode::kInvalidArgument, [&] {
    return "Gradient " + std::to_string(shared->first) + " and gradient " +
           std::to_string(shared->second) +
           " share memory and would be unscaled twice; list each tensor once.";
  });
}

}  // namespace

GradStats unscale_bound(const std::vector<TensorView>& grads, float inverse_scale) {
  return run(grads, {.unscale = inverse_scale != 1.0f, .inverse_scale = inverse_scale}, nullptr);
}

}  // namespace internal

double GradStats::norm() const { return internal::norm_of(*this); }

GradStats measure(const std::vector<TensorView>& grads, GradDetail* detail) {
  internal::check_views(grads, internal::Access::kRead);
  return internal::run(grads, {}, detail);
}

GradStats measure(const std::vector<Parameter>& parameters, GradDetail* detail) {
  std::vector<TensorView> grads;
  grads.reserve(parameters.size());
  for (const Parameter& parameter : parameters) grads.push_back(parameter.grad);
  return measure(grads, detail);
}

GradStats unscale_(const std::vector<TensorView>& grads, float inverse_scale) {
  const bool possible = std::isfinite(inverse_scale) && inverse_scale > 0.0f;
  internal::require(possible, ErrorCode::kInvalidArgument, [&] {
    return "unscale_ got an inverse scale of " + internal::number(inverse_scale) +
           "; pass 1/scale, a finite number above 0.";
  });
  internal::check_views(grads, internal::Access::kWrite);
  internal::check_apart(grads);
  return internal::unscale_bound(grads, inverse_scale);
}

std::string describe_culprit(const GradStats& stats, const std::vector<Parameter>& parameters) {
  if (stats.culprit < 0) return "";
  const auto index = static_cast<size_t>(stats.culprit);
  std::string text = index < parameters.size() && !parameters[index].name.empty()
                         ? parameters[index].name
                         : "gradient " + std::to_string(index);
  return text + ": " + std::to_string(stats.culprit_inf) + " inf, " +
         std::to_string(stats.culprit_nan) + " nan";
}

}  // namespace headroom
