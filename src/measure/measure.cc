#include <headroom/measure.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/parallel.h"
#include "measure/careful.h"
#include "measure/kernels.h"

namespace headroom {
namespace internal {
namespace {

// Elements that one thread reads before it takes more work.
constexpr size_t kJobElements = size_t{1} << 16;

// Spans [begin, end) of one type. How a list is cut into jobs depends on the list alone, and
// results are merged in the order of the list, so threads cannot change a bit.
struct Job {
  DType dtype;
  size_t begin;
  size_t end;
};

struct Plan {
  std::vector<Span> spans;
  std::vector<Job> jobs;
  size_t bytes = 0;
};

void append(const TensorView& view, int64_t tensor, size_t* room, Plan* plan) {
  size_t left = static_cast<size_t>(view.count);
  char* data = static_cast<char*>(view.data);
  plan->bytes += view.bytes();
  while (left > 0) {
    if (*room == 0 || plan->jobs.empty() || plan->jobs.back().dtype != view.dtype) {
      plan->jobs.push_back({view.dtype, plan->spans.size(), plan->spans.size()});
      *room = kJobElements;
    }
    // A cut inside a tensor falls on a whole block.
    const size_t take = left <= *room ? left : *room / kBlock * kBlock;
    if (take == 0) {
      *room = 0;
      continue;
    }
    plan->spans.push_back({data, take, tensor});
    plan->jobs.back().end = plan->spans.size();
    data += take * size_of(view.dtype);
    left -= take;
    *room -= take;
  }
}

Plan make_plan(const std::vector<TensorView>& grads, Access access) {
  Plan plan;
  plan.spans.reserve(grads.size());
  size_t room = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    check_view(grads[i], access, [i] { return "Gradient " + std::to_string(i); });
    append(grads[i], static_cast<int64_t>(i), &room, &plan);
  }
  return plan;
}

Partial run(const Plan& plan, const MeasureJob& job) {
  std::vector<Partial> partials(plan.jobs.size());
  const MeasureKernels& kernels = measure_kernels();
  parallel_for(plan.jobs.size(), plan.bytes, [&](size_t i) {
    const Job& work = plan.jobs[i];
    kernels.by_dtype[static_cast<size_t>(work.dtype)](
        plan.spans.data() + work.begin, work.end - work.begin, job, &partials[i]);
  });
  Partial whole;
  for (const Partial& part : partials) {
    merge(part.stats, &whole.stats);
    whole.new_inf += part.new_inf;
    whole.new_zeros += part.new_zeros;
  }
  return whole;
}

}  // namespace

void merge(const GradStats& part, GradStats* whole) {
  whole->count += part.count;
  whole->inf_count += part.inf_count;
  whole->nan_count += part.nan_count;
  whole->amax = std::max(whole->amax, part.amax);
  whole->squares.add(part.squares);
  if (part.culprit >= 0) {
    if (whole->culprit < 0) whole->culprit = part.culprit;
    if (whole->culprit == part.culprit) {
      whole->culprit_inf += part.culprit_inf;
      whole->culprit_nan += part.culprit_nan;
    }
  }
  whole->detail.zeros += part.detail.zeros;
  whole->detail.subnormals += part.detail.subnormals;
  whole->detail.histogram.resize(
      std::max(whole->detail.histogram.size(), part.detail.histogram.size()));
  for (size_t i = 0; i < part.detail.histogram.size(); ++i) {
    whole->detail.histogram[i] += part.detail.histogram[i];
  }
}

}  // namespace internal

void SumOfSquares::add(const SumOfSquares& other) {
  if (other.value == 0.0) return;
  if (value == 0.0 || exponent == other.exponent) {
    value += other.value;
    exponent = other.exponent;
    return;
  }
  // The smaller unit is converted to the larger one; what that loses is far below rounding.
  const int larger = std::max(exponent, other.exponent);
  value = std::ldexp(value, 2 * (exponent - larger)) +
          std::ldexp(other.value, 2 * (other.exponent - larger));
  exponent = larger;
}

double SumOfSquares::root() const { return std::ldexp(std::sqrt(value), exponent); }

double GradStats::norm() const {
  if (nan_count > 0) return std::nan("");
  if (inf_count > 0) return HUGE_VAL;
  return squares.root();
}

GradStats measure(const std::vector<TensorView>& grads, const MeasureOptions& options) {
  const internal::Plan plan = internal::make_plan(grads, internal::Access::kRead);
  return internal::run(plan, {.detail = options.detail}).stats;
}

GradStats measure(const std::vector<Parameter>& parameters, const MeasureOptions& options) {
  std::vector<TensorView> grads;
  grads.reserve(parameters.size());
  for (const Parameter& parameter : parameters) grads.push_back(parameter.grad);
  return measure(grads, options);
}

UnscaleResult unscale_(const std::vector<TensorView>& grads, float inverse_scale) {
  internal::require(std::isfinite(inverse_scale) && inverse_scale > 0.0f,
                    ErrorCode::kInvalidArgument, [&] {
                      return "unscale_ got an inverse scale of " + internal::number(inverse_scale) +
                             "; pass 1/scale, a finite number above 0.";
                    });
  const internal::Plan plan = internal::make_plan(grads, internal::Access::kWrite);
  const internal::Partial whole = internal::run(
      plan, {.unscale = inverse_scale != 1.0f, .inverse_scale = inverse_scale});
  return {whole.stats, whole.new_inf, whole.new_zeros};
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
