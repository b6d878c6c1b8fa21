#include <headroom/optimizer.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "apply/checks.h"
#include "apply/record.h"
#include "core/check.h"
#include "core/cuda.h"
#include "core/parallel.h"

namespace headroom {
namespace {

using internal::Access;
using internal::check_form;
using internal::require;

std::shared_ptr<internal::OptimizerRecord> new_record(Optimizer* owner) {
  static std::atomic<uint64_t> next{1};
  auto record = std::make_shared<internal::OptimizerRecord>();
  record->id = next++;
  record->owner = owner;
  return record;
}

std::string name_of(const Parameter& parameter, size_t index) {
  return parameter.name.empty() ? "Parameter " + std::to_string(index)
                                : "Parameter '" + parameter.name + "'";
}

bool given(const TensorView& view) { return view.data != nullptr || view.count != 0; }

std::string weight_of(const Parameter& parameter, size_t index) {
  return "The weight of " + name_of(parameter, index);
}
std::string gradient_of(const Parameter& parameter, size_t index) {
  return "The gradient of " + name_of(parameter, index);
}

std::string state_array_of(const Parameter& parameter, size_t index) {
  return "The master or moment of " + name_of(parameter, index);
}

// An FP32 array that the caller has given for a master or a moment.
void check_state_array(const TensorView& array, const Parameter& parameter, size_t index) {
  check_form(array, Access::kWrite, [&] { return state_array_of(parameter, index); });
  const TensorView& weight = parameter.weight;
  const bool fits = array.dtype == DType::kF32 && array.count == weight.count &&
                    array.device.type == weight.device.type &&
                    array.device.index == weight.device.index;
  require(fits, ErrorCode::kMismatch, [&] {
    return state_array_of(parameter, index) + " has " + std::to_string(array.count) +
           " elements of type " + to_string(array.dtype) + "; it has to be " +
           std::to_string(weight.count) + " of f32 on the device of the weight.";
  });
}

void check_parameter(const Parameter& parameter, size_t index) {
  check_form(parameter.weight, Access::kWrite, [&] { return weight_of(parameter, index); });
  for (const TensorView& array :
       {parameter.master, parameter.first_moment, parameter.second_moment}) {
    if (given(array)) check_state_array(array, parameter, index);
  }
  if (!given(parameter.grad)) return;
  check_form(parameter.grad, Access::kWrite, [&] { return gradient_of(parameter, index); });
  if (!given(parameter.weight)) return;
  const Device& there = parameter.grad.device;
  require(
      there.type == parameter.weight.device.type && there.index == parameter.weight.device.index,
      ErrorCode::kMismatch, [&] {
        return name_of(parameter, index) + " has its weight and its gradient on different devices.";
      });
  require(parameter.grad.count == parameter.weight.count, ErrorCode::kMismatch, [&] {
    return name_of(parameter, index) + " has a weight of " +
           std::to_string(parameter.weight.count) + " elements and a gradient of " +
           std::to_string(parameter.grad.count) + "; they have to be equal.";
  });
}

bool same_place(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.device.type == b.device.type && a.device.index == b.device.index &&
         (b.count > 0 || a.count == 0);
}

// Throws unless weight and gradient are where their views say; `bound` was looked up before.
void check_places(const Parameter& parameter, size_t index, const Parameter& bound) {
  if (!same_place(parameter.weight, bound.weight)) {
    internal::check_memory(parameter.weight, [&] { return weight_of(parameter, index); });
  }
  if (!same_place(parameter.grad, bound.grad)) {
    internal::check_memory(parameter.grad, [&] { return gradient_of(parameter, index); });
  }
  const auto check_array = [&](const TensorView& now, const TensorView& before) {
    if (same_place(now, before)) return;
    internal::check_memory(now, [&] { return state_array_of(parameter, index); });
  };
  check_array(parameter.master, bound.master);
  check_array(parameter.first_moment, bound.first_moment);
  check_array(parameter.second_moment, bound.second_moment);
}

// Throws if any two weights or gradients share memory. Sorting makes it n log n.
void check_apart(const std::vector<Parameter>& parameters) {
  struct Range {
    const TensorView* view;
    size_t index;
    const char* what;
  };
  std::vector<Range> ranges;
  ranges.reserve(2 * parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].weight.count > 0) ranges.push_back({&parameters[i].weight, i, "weight"});
    if (parameters[i].grad.count > 0) ranges.push_back({&parameters[i].grad, i, "gradient"});
    if (parameters[i].master.count > 0) ranges.push_back({&parameters[i].master, i, "master"});
    for (const TensorView* moment : {&parameters[i].first_moment, &parameters[i].second_moment}) {
      if (moment->count > 0) ranges.push_back({moment, i, "moment"});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.view->data < b.view->data; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    const Range& a = ranges[i - 1];
    const Range& b = ranges[i];
    require(!internal::overlap(*a.view, *b.view), ErrorCode::kInvalidArgument, [&] {
      return "The " + std::string(a.what) + " of " + name_of(parameters[a.index], a.index) +
             " and the " + b.what + " of " + name_of(parameters[b.index], b.index) +
             " share memory; every tensor needs its own (list a tied weight once).";
    });
  }
}

}  // namespace

void internal::check_parameters(const std::vector<Parameter>& parameters,
                                const std::vector<Parameter>& bound) {
  for (size_t i = 0; i < parameters.size(); ++i) check_parameter(parameters[i], i);
  check_apart(parameters);
  const Parameter unknown;
  for (size_t i = 0; i < parameters.size(); ++i) {
    check_places(parameters[i], i, i < bound.size() ? bound[i] : unknown);
  }
}

void internal::check_whole(bool whole) {
  require(whole, ErrorCode::kInvalidArgument, [] {
    return "This optimizer was moved from and is empty; use the one it was moved to.";
  });
}

Optimizer::Optimizer(std::vector<Parameter> parameters) : record_(new_record(this)) {
  append(std::move(parameters));
}

Optimizer::Optimizer(Optimizer&& other) noexcept { *this = std::move(other); }

Optimizer& Optimizer::operator=(Optimizer&& other) noexcept {
  record_ = std::move(other.record_);
  if (record_ != nullptr) record_->owner = this;
  return *this;
}

Optimizer::~Optimizer() = default;

const std::vector<Parameter>& Optimizer::parameters() const {
  static const std::vector<Parameter> none;
  return record_ != nullptr ? record_->parameters : none;
}

bool Optimizer::apply_on_device(const DeviceVerdict*, bool, void*) { return false; }

void Optimizer::skipped(const std::string&) {}

void Optimizer::refresh() {}

void Optimizer::gradients_changed() {}

bool Optimizer::overflows(float) const { return false; }

internal::CudaApply* Optimizer::cuda_side(int, internal::ApplyJob*) { return nullptr; }

void Optimizer::append(std::vector<Parameter> parameters) {
  internal::check_whole(record_ != nullptr);
  std::vector<Parameter> all = record_->parameters;
  all.insert(all.end(), std::make_move_iterator(parameters.begin()),
             std::make_move_iterator(parameters.end()));
  internal::check_parameters(all, record_->parameters);
  record_->parameters = std::move(all);
  ++record_->revision;
}

void Optimizer::set_grad(size_t index, const TensorView& grad) {
  internal::check_whole(record_ != nullptr);
  std::vector<Parameter>& parameters = record_->parameters;
  require(index < parameters.size(), ErrorCode::kInvalidArgument, [&] {
    return "set_grad got index " + std::to_string(index) + ", but there are " +
           std::to_string(parameters.size()) + " parameters.";
  });
  Parameter changed = parameters[index];
  changed.grad = grad;
  check_parameter(changed, index);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool clash = internal::overlap(grad, parameters[i].weight) ||
                       (i != index && internal::overlap(grad, parameters[i].grad));
    require(!clash, ErrorCode::kInvalidArgument, [&] {
      return "The new gradient of " + name_of(changed, index) + " and " +
             name_of(parameters[i], i) + " share memory; every tensor needs its own.";
    });
  }
  check_places(changed, index, parameters[index]);
  parameters[index] = std::move(changed);
  ++record_->revision;
}

void Optimizer::rebind(std::vector<Parameter> parameters) {
  internal::check_whole(record_ != nullptr);
  internal::check_parameters(parameters, record_->parameters);
  record_->parameters = std::move(parameters);
  ++record_->revision;
}

void Optimizer::zero_grad() {
  size_t bytes = 0;
  for (const Parameter& parameter : parameters()) {
    const TensorView& grad = parameter.grad;
    if (grad.device.type == DeviceType::kCUDA && grad.count > 0) internal::cuda_zero(grad);
    bytes += grad.bytes();
  }
  internal::parallel_for(parameters().size(), bytes, [&](size_t i) {
    const TensorView& grad = parameters()[i].grad;
    if (grad.device.type == DeviceType::kCUDA) return;
    if (grad.count > 0) std::memset(grad.data, 0, grad.bytes());
  });
}

}  // namespace headroom
