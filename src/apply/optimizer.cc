// The base class of all optimizers: a checked list of parameters, and hooks for GradScaler.
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
using internal::NamedView;
using internal::require;

// Ids start at 1: 0 means "no optimizer" in a scaler.
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

// "weight of Parameter 'embed'"
std::string name_of(const NamedView& array, const Parameter& parameter, size_t index) {
  return std::string(array.name) + " of " + name_of(parameter, index);
}

// Whether a view is not default-constructed.
bool given(const TensorView& view) { return view.data != nullptr || view.count != 0; }

// Throws unless an FP32 array that the caller provides for a master or a moment fits the weight.
void check_state_array(const NamedView& array, const Parameter& parameter, size_t index) {
  const TensorView& view = *array.view;
  const TensorView& weight = parameter.weight;
  const bool fits = view.dtype == DType::kF32 && view.count == weight.count &&
                    internal::same_device(view.device, weight.device);
  require(fits, ErrorCode::kMismatch, [&] {
    return "The " + name_of(array, parameter, index) + " has " + std::to_string(view.count) +
           " elements of type " + to_string(view.dtype) + "; it has to be " +
           std::to_string(weight.count) + " of f32 on the device of the weight.";
  });
}

// Checks of one parameter that do not need CUDA.
void check_parameter(const Parameter& parameter, size_t index) {
  const TensorView& weight = parameter.weight;
  const TensorView& grad = parameter.grad;
  for (const NamedView& array : internal::arrays_of(parameter)) {
    if (!given(*array.view)) continue;
    internal::check_form(*array.view, Access::kWrite,
                         [&] { return "The " + name_of(array, parameter, index); });
    if (array.view != &weight && array.view != &grad) check_state_array(array, parameter, index);
  }
  if (!given(grad) || !given(weight)) return;
  require(internal::same_device(grad.device, weight.device), ErrorCode::kMismatch, [&] {
    return name_of(parameter, index) + " has its weight and its gradient on different devices.";
  });
  require(grad.count == weight.count, ErrorCode::kMismatch, [&] {
    return name_of(parameter, index) + " has a weight of " + std::to_string(weight.count) +
           " elements and a gradient of " + std::to_string(grad.count) + "; they have to be equal.";
  });
}

// Whether the location of `a` was checked as that of `b`. The location of an empty view never is.
bool same_place(const TensorView& a, const TensorView& b) {
  return a.data == b.data && internal::same_device(a.device, b.device) &&
         (b.count > 0 || a.count == 0);
}

// Throws unless all memory is on the device that its view names. Views that are equal to those of
// `bound` were checked before.
void check_places(const Parameter& parameter, size_t index, const Parameter& bound) {
  const auto arrays = internal::arrays_of(parameter);
  const auto checked = internal::arrays_of(bound);
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (same_place(*arrays[i].view, *checked[i].view)) continue;
    internal::check_memory(*arrays[i].view,
                           [&] { return "The " + name_of(arrays[i], parameter, index); });
  }
}

// Throws if any two arrays share memory.
void check_apart(const std::vector<Parameter>& parameters) {
  std::vector<const TensorView*> views;
  for (const Parameter& parameter : parameters) {
    for (const NamedView& array : internal::arrays_of(parameter)) views.push_back(array.view);
  }
  const auto shared = internal::find_overlap(views);
  const auto name = [&](size_t view) {
    const size_t index = view / 5;
    return name_of(internal::arrays_of(parameters[index])[view % 5], parameters[index], index);
  };
  require(!shared, ErrorCode::kInvalidArgument, [&] {
    return "The " + name(shared->first) + " and the " + name(shared->second) +
           " share memory; every tensor needs its own (list a tied weight once).";
  });
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

void internal::check_not_moved_from(bool has_state) {
  require(has_state, ErrorCode::kInvalidArgument,
          "This optimizer was moved from and is empty; use the one it was moved to.");
}

Optimizer::Optimizer(std::vector<Parameter> parameters) : record_(new_record(this)) {
  append(std::move(parameters));
}

Optimizer::Optimizer(Optimizer&& other) noexcept { *this = std::move(other); }

// A scaler finds the optimizer through the record, which has to point to its new address.
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

void Optimizer::append(std::vector<Parameter> parameters) {
  internal::check_not_moved_from(record_ != nullptr);
  std::vector<Parameter> all = record_->parameters;
  all.insert(all.end(), std::make_move_iterator(parameters.begin()),
             std::make_move_iterator(parameters.end()));
  Optimizer::rebind(std::move(all));
}

void Optimizer::set_grad(size_t index, const TensorView& grad) {
  internal::check_not_moved_from(record_ != nullptr);
  std::vector<Parameter>& parameters = record_->parameters;
  require(index < parameters.size(), ErrorCode::kInvalidArgument, [&] {
    return "set_grad got index " + std::to_string(index) + ", but there are " +
           std::to_string(parameters.size()) + " parameters.";
  });
  Parameter changed = parameters[index];
  changed.grad = grad;
  check_parameter(changed, index);
  // Only the new gradient can overlap anything: the rest was checked when it was bound.
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto arrays = internal::arrays_of(parameters[i]);
    const bool clash = std::any_of(arrays.begin(), arrays.end(), [&](const auto& array) {
      const bool replaced = i == index && array.view == &parameters[i].grad;
      return !replaced && internal::overlap(grad, *array.view);
    });
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
  internal::check_not_moved_from(record_ != nullptr);
  internal::check_parameters(parameters, record_->parameters);
  record_->parameters = std::move(parameters);
  ++record_->revision;
}

void Optimizer::drop_gradients() {
  internal::check_not_moved_from(record_ != nullptr);
  for (Parameter& parameter : record_->parameters) parameter.grad = {};
  ++record_->revision;
}

// Enqueues for gradients on CUDA devices, while threads clear those in host memory.
void Optimizer::zero_grad() {
  size_t bytes = 0;
  for (const Parameter& parameter : parameters()) {
    const TensorView& grad = parameter.grad;
    if (grad.device.type == DeviceType::kCUDA && grad.count > 0) {
      internal::cuda_zero(grad.device.index, grad.data, grad.bytes());
    }
    bytes += grad.bytes();
  }
  internal::parallel_for(parameters().size(), bytes, [&](size_t i) {
    const TensorView& grad = parameters()[i].grad;
    if (grad.device.type == DeviceType::kCUDA) return;
    if (grad.count > 0) std::memset(grad.data, 0, grad.bytes());
  });
}

}  // namespace headroom
