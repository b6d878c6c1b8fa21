// Gradients, weights and state of an optimizer.
#include "adapters/c/handles.h"
#include "adapters/c/structs.h"

using namespace headroom::c;
using headroom::FusedOptimizer;
using headroom::OptimizerState;

namespace {

// Throws HR_ERROR_UNSUPPORTED for optimizers made of callbacks, whose state the core does not have.
FusedOptimizer& fused(OptimizerCall& call) {
  return call.as<FusedOptimizer>("SGD, Adam, AdamW or Lion, which have a state");
}

}  // namespace

hr_status hr_optimizer_zero_grad(hr_optimizer* optimizer) {
  return guarded(__func__, [&] { OptimizerCall(optimizer)->zero_grad(); });
}

// Null, or an hr_tensor whose members are all 0, removes the gradient.
hr_status hr_optimizer_set_grad(hr_optimizer* optimizer, size_t index, const hr_tensor* grad) {
  return guarded(__func__, [&] {
    const auto view = grad != nullptr ? view_from(*grad) : headroom::TensorView{};
    OptimizerCall(optimizer)->set_grad(index, view);
  });
}

// The core checks all parameters before it replaces any.
hr_status hr_optimizer_rebind(hr_optimizer* optimizer, const hr_parameter* parameters,
                              size_t count) {
  return guarded(__func__, [&] {
    auto list = parameters_from(parameters, count);
    OptimizerCall(optimizer)->rebind(std::move(list));
  });
}

hr_status hr_optimizer_refresh_masters(hr_optimizer* optimizer) {
  return guarded(__func__, [&] {
    OptimizerCall call(optimizer);
    fused(call).refresh_masters();
  });
}

// The entry stores what `state` points to. Both vectors are complete before the old ones are
// replaced, so a failure leaves the pointers of the previous call valid.
hr_status hr_optimizer_get_state(hr_optimizer* optimizer, hr_optimizer_state* state) {
  return guarded(__func__, [&] {
    check_output(require(state, "state"), "state");
    OptimizerCall call(optimizer);
    OptimizerEntry& entry = call.entry();
    OptimizerState now = fused(call).state();
    std::vector<hr_state_tensor> tensors;
    tensors.reserve(now.tensors.size());
    for (const headroom::NamedTensor& tensor : now.tensors) {
      tensors.push_back(
          {tensor.name.c_str(), c_tensor(tensor.tensor), static_cast<int64_t>(tensor.parameter)});
    }
    entry.state = std::move(now);  // moving keeps the strings in place, so `tensors` stays valid
    entry.state_tensors = std::move(tensors);
    write_struct({0, entry.state.steps.size(), entry.state.steps.data(), entry.state_tensors.size(),
                  entry.state_tensors.data()},
                 state);
  });
}

// Converts without copying the tensors: the core reads the caller's memory during this call only.
hr_status hr_optimizer_load_state(hr_optimizer* optimizer, const hr_optimizer_state* state) {
  return guarded(__func__, [&] {
    const hr_optimizer_state given = read_struct(require(state, "state"), {}, "state");
    OptimizerState saved;
    saved.steps.reserve(given.step_count);  // throws for a count that no memory can hold
    saved.tensors.reserve(given.tensor_count);
    if (given.step_count > 0) {
      require(given.steps, "state->steps");
      saved.steps.assign(given.steps, given.steps + given.step_count);
    }
    if (given.tensor_count > 0) require(given.tensors, "state->tensors");
    for (size_t i = 0; i < given.tensor_count; ++i) {
      const hr_state_tensor& tensor = given.tensors[i];
      saved.tensors.push_back({require(tensor.name, "state->tensors[].name"),
                               view_from(tensor.tensor), static_cast<size_t>(tensor.parameter)});
    }
    OptimizerCall call(optimizer);
    fused(call).load_state(saved);
  });
}
