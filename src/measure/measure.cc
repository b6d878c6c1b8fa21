#include <headroom/measure.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

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

// Elements that one thread reads before it takes more work.
constexpr int64_t kRangeElements = int64_t{1} << 16;

// How a list is cut into ranges depends on the list alone, and results are merged in the order of
// the list, so threads cannot change a bit.
struct Plan {
  std::vector<Range> ranges;
  size_t bytes = 0;
};

Plan make_plan(const std::vector<TensorView>& grads) {
  Plan plan;
  Range range{};     // the one being filled
  DType dtype{};     // its type
  int64_t room = 0;  // elements that still fit
  const auto close = [&] {
    if (room == 0 && range.last_end == 0) return;  // none yet
    plan.ranges.push_back(range);
    plan.bytes += static_cast<size_t>(kRangeElements - room) * size_of(dtype);
  };
  for (size_t i = 0; i < grads.size(); ++i) {
    const TensorView& grad = grads[i];
    if (grad.dtype == dtype && grad.count > 0 && grad.count <= room) {  // many small tensors
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

// Adds up the counts of several ranges.
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
  const MeasureKernels& kernels = measure_kernels();
  parallel_for(plan.ranges.size(), plan.bytes, [&](size_t i) {
    const Range& range = plan.ranges[i];
    const auto dtype = static_cast<size_t>(grads[range.first].dtype);
    kernels.by_dtype[dtype](grads.data(), range, job, &parts[i],
                            detail != nullptr ? &details[i] : nullptr);
  });
  GradStats whole;
  for (const GradStats& part : parts) merge(part, &whole);
  for (const GradDetail& part : details) merge_detail(part, detail);
  return whole;
}

// Measures the tensors of each device by themselves; a culprit is the first in the whole list.
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

std::string gradient(size_t index) { return "Gradient " + std::to_string(index); }

void check_views(const std::vector<TensorView>& grads, Access access) {
  for (size_t i = 0; i < grads.size(); ++i) {
    check_view(grads[i], access, [i] { return gradient(i); });
  }
}

// Throws if any two of them share memory, which would be unscaled twice, by two threads at a time.
void check_apart(const std::vector<TensorView>& grads) {
  std::vector<size_t> order;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].count > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(grads[a].data, a) < std::pair(grads[b].data, b);
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const auto [first, second] = std::minmax(order[i - 1], order[i]);
    require(!overlap(grads[first], grads[second]), ErrorCode::kInvalidArgument,
            [&, a = first, b = second] {
              return gradient(a) + " and gradient " + std::to_string(b) +
                     " share memory and would be unscaled twice; list each tensor once.";
            });
  }
}

}  // namespace

GradStats measure_bound(const std::vector<TensorView>& grads) { return run(grads, {}, nullptr); }

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
  internal::require(std::isfinite(inverse_scale) && inverse_scale > 0.0f,
                    ErrorCode::kInvalidArgument, [&] {
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
