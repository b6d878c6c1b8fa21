// SGD, Adam, AdamW and Lion, optimizers made of callbacks, and accumulators.
#include <type_traits>

#include "adapters/c/handles.h"
#include "adapters/c/structs.h"

using namespace headroom::c;
using headroom::AdamOptions;
using headroom::GradAccumulator;
using headroom::LionOptions;
using headroom::Optimizer;
using headroom::Parameter;
using headroom::Precision;
using headroom::SGDOptions;
using headroom::StateFormat;

namespace {

/// An optimizer whose update is a function of another language. Copies the callbacks; `user`
/// belongs to the caller. Gradients are scaled in memory, and the callback gets the multiplier.
class CallbackOptimizer : public Optimizer {
 public:
  CallbackOptimizer(std::vector<Parameter> parameters, const hr_optimizer_callbacks& callbacks)
      : Optimizer(std::move(parameters)), callbacks_(callbacks) {}

  void apply(float multiplier, bool clear_grads) override {
    int32_t failed = 0;
    call("apply", [&] { failed = callbacks_.apply(multiplier, clear_grads, callbacks_.user); });
    if (failed == 0) return;
    throw Failure{HR_ERROR_CALLBACK, "the optimizer's apply callback returned " +
                                         std::to_string(failed) + "; the step is not counted."};
  }

  void skipped(const std::string& culprit) override {
    if (callbacks_.skipped == nullptr) return;
    call("skipped", [&] { callbacks_.skipped(culprit.c_str(), callbacks_.user); });
  }

 private:
  template <typename Callback>
  static void call(const char* name, const Callback& callback) {
    call_and_catch(callback, [&] {
      throw Failure{HR_ERROR_CALLBACK, "the optimizer's " + std::string(name) + " callback threw."};
    });
  }

  hr_optimizer_callbacks callbacks_;
};

// Of Adam, AdamW and Lion, which has no eps. Momentum and the rest of SGD's are 0.
template <typename Options>
hr_fused_options c_options(const Options& options) {
  hr_fused_options out = {};
  out.lr = options.lr;
  out.weight_decay = options.weight_decay;
  out.beta1 = options.beta1;
  out.beta2 = options.beta2;
  if constexpr (requires { options.eps; }) out.eps = options.eps;
  return out;
}

hr_fused_options c_options(const SGDOptions& options) {
  hr_fused_options out = c_options(AdamOptions{});
  out.lr = options.lr;
  out.weight_decay = options.weight_decay;
  out.momentum = options.momentum;
  out.dampening = options.dampening;
  out.nesterov = options.nesterov;
  return out;
}

void convert(const hr_fused_options& from, LionOptions* to) {
  *to = {from.lr, from.beta1, from.beta2, from.weight_decay};
}

template <typename Adam>
void convert(const hr_fused_options& from, Adam* to) {
  *to = {from.lr, from.beta1, from.beta2, from.eps, from.weight_decay};
}

void convert(const hr_fused_options& from, SGDOptions* to) {
  *to = {from.lr, from.momentum, from.dampening, from.weight_decay, from.nesterov != 0};
}

// The caller's options, or the defaults of this kind of optimizer.
template <typename Options>
Options options_from(const hr_fused_options* given) {
  Options options;
  convert(read_struct(given, c_options(options), "options"), &options);
  return options;
}

// Reads the defaults of C++, so that they are defined once.
hr_precision default_precision() {
  const Precision precision;
  return {.size = 0,
          .seed = precision.seed,
          .master_weights = precision.master_weights,
          .stochastic_rounding = precision.stochastic_rounding,
          .state = static_cast<int32_t>(precision.state),
          .reserved = 0};
}

Precision precision_from(const hr_precision* given) {
  const hr_precision from = read_struct(given, default_precision(), "precision");
  if (from.state < HR_STATE_FULL || from.state > HR_STATE_BYTE) {
    throw Failure{HR_ERROR_INVALID_ARGUMENT,
                  "'precision->state' is " + std::to_string(from.state) +
                      "; use HR_STATE_FULL, HR_STATE_HALF or HR_STATE_BYTE."};
  }
  return {.master_weights = from.master_weights != 0,
          .stochastic_rounding = from.stochastic_rounding != 0,
          .seed = from.seed,
          .state = static_cast<StateFormat>(from.state)};
}

// The options type of headroom::SGD, Adam or AdamW.
template <typename Fused>
using OptionsOf = std::decay_t<decltype(std::declval<Fused>().options())>;

// Calls use(std::type_identity<Fused>) with the class of this kind of optimizer.
template <typename Use>
void with_kind(int32_t kind, const Use& use) {
  switch (kind) {
    case HR_SGD:
      return use(std::type_identity<headroom::SGD>());
    case HR_ADAM:
      return use(std::type_identity<headroom::Adam>());
    case HR_ADAMW:
      return use(std::type_identity<headroom::AdamW>());
    case HR_LION:
      return use(std::type_identity<headroom::Lion>());
    default:
      throw Failure{HR_ERROR_INVALID_ARGUMENT, "'kind' is " + std::to_string(kind) +
                                                   "; use HR_SGD, HR_ADAM, HR_ADAMW or HR_LION."};
  }
}

// Locks the optimizer and calls use(optimizer) with its class.
template <typename Use>
void with_fused(hr_optimizer* handle, const Use& use) {
  OptimizerCall call(handle);
  if (auto* const sgd = dynamic_cast<headroom::SGD*>(&*call)) return use(*sgd);
  if (auto* const adam = dynamic_cast<headroom::Adam*>(&*call)) return use(*adam);
  if (auto* const lion = dynamic_cast<headroom::Lion*>(&*call)) return use(*lion);
  use(call.as<headroom::AdamW>("SGD, Adam, AdamW or Lion"));
}

// Registers an optimizer and returns its handle. The registry owns it until hr_optimizer_destroy().
hr_optimizer* add_optimizer(std::unique_ptr<Optimizer> object) {
  auto entry = std::make_shared<OptimizerEntry>();
  entry->accumulator = dynamic_cast<GradAccumulator*>(object.get());
  entry->object = std::move(object);
  return optimizers().add(std::move(entry));
}

}  // namespace

hr_status hr_fused_options_init(hr_fused_options* options, size_t size, int32_t kind) {
  return guarded(__func__, [&] {
    with_kind(kind, [&]<typename Fused>(std::type_identity<Fused>) {
      init_struct(options, size, c_options(OptionsOf<Fused>{}), "options");
    });
  });
}

hr_status hr_precision_init(hr_precision* precision, size_t size) {
  return guarded(__func__, [&] { init_struct(precision, size, default_precision(), "precision"); });
}

hr_status hr_fused_create(int32_t kind, const hr_parameter* parameters, size_t count,
                          const hr_fused_options* options, const hr_precision* precision,
                          hr_optimizer** optimizer) {
  return guarded(__func__, [&] {
    require(optimizer, "optimizer");
    const Precision given = precision_from(precision);
    with_kind(kind, [&]<typename Fused>(std::type_identity<Fused>) {
      *optimizer = add_optimizer(std::make_unique<Fused>(
          parameters_from(parameters, count), options_from<OptionsOf<Fused>>(options), given));
    });
  });
}

// Strong guarantee: if a parameter or option is invalid, the core adds nothing.
hr_status hr_fused_add_group(hr_optimizer* optimizer, const hr_parameter* parameters, size_t count,
                             const hr_fused_options* options, size_t* group) {
  return guarded(__func__, [&] {
    with_fused(optimizer, [&]<typename Fused>(Fused& fused) {
      const size_t added = fused.add_group(parameters_from(parameters, count),
                                           options_from<OptionsOf<Fused>>(options));
      if (group != nullptr) *group = added;
    });
  });
}

hr_status hr_fused_set_options(hr_optimizer* optimizer, size_t group,
                               const hr_fused_options* options) {
  return guarded(__func__, [&] {
    require(options, "options");
    with_fused(optimizer, [&]<typename Fused>(Fused& fused) {
      fused.set_options(options_from<OptionsOf<Fused>>(options), group);
    });
  });
}

hr_status hr_fused_get_options(hr_optimizer* optimizer, size_t group, hr_fused_options* options) {
  return guarded(__func__, [&] {
    check_output(require(options, "options"), "options");
    with_fused(optimizer,
               [&](auto& fused) { write_struct(c_options(fused.options(group)), options); });
  });
}

hr_status hr_optimizer_set_lr(hr_optimizer* optimizer, double lr) {
  return guarded(__func__, [&] { with_fused(optimizer, [&](auto& fused) { fused.set_lr(lr); }); });
}

hr_status hr_optimizer_create(const hr_parameter* parameters, size_t count,
                              const hr_optimizer_callbacks* callbacks, hr_optimizer** optimizer) {
  return guarded(__func__, [&] {
    require(optimizer, "optimizer");
    const auto given = read_struct(require(callbacks, "callbacks"), {}, "callbacks");
    if (given.apply == nullptr) {
      throw Failure{HR_ERROR_NULL, "'callbacks->apply' is null; pass a function."};
    }
    *optimizer = add_optimizer(
        std::make_unique<CallbackOptimizer>(parameters_from(parameters, count), given));
  });
}

hr_status hr_accumulator_create(const hr_parameter* parameters, size_t count,
                                hr_optimizer** accumulator) {
  return guarded(__func__, [&] {
    require(accumulator, "accumulator");
    *accumulator =
        add_optimizer(std::make_unique<GradAccumulator>(parameters_from(parameters, count)));
  });
}

// The name and the sums belong to the accumulator and live as long as it does.
hr_status hr_accumulator_summed(hr_optimizer* accumulator, size_t index, hr_parameter* parameter) {
  return guarded(__func__, [&] {
    require(parameter, "parameter");
    OptimizerCall call(accumulator, "accumulator");
    const auto& summed = call.as<GradAccumulator>("an accumulator").summed();
    const Parameter& found = at(summed, index, "parameters");
    *parameter = {found.name.c_str(), c_tensor(found.weight), c_tensor(found.grad)};
  });
}

// Locks the accumulator, then the optimizer and those stepped by it before.
hr_status hr_accumulator_step(hr_optimizer* accumulator, hr_optimizer* optimizer,
                              const hr_step_options* options, hr_report* report) {
  return guarded(__func__, [&] {
    check_output(report, "report");
    const headroom::StepOptions given = step_options_from(options);
    OptimizerCall call(accumulator, "accumulator");
    auto& sums = call.as<GradAccumulator>("an accumulator");
    // Stepping one accumulator by another would break the order in which locks are taken.
    if (const auto entry = optimizers().find(require(optimizer, "optimizer"));
        entry != nullptr && entry->accumulator != nullptr) {
      throw Failure{HR_ERROR_UNSUPPORTED,
                    "an accumulator cannot step another one; pass the optimizer that was created "
                    "on its sums."};
    }
    SteppedCall stepped(&call.entry().stepped, optimizer);
    write_struct(c_report(sums.step(*stepped, given)), report);
  });
}

// As hr_scaler_destroy(). A scaler that has stepped the optimizer drops it by itself.
hr_status hr_optimizer_destroy(hr_optimizer* optimizer) {
  return guarded(__func__, [&] {
    OptimizerCall call(optimizer);
    optimizers().remove(optimizer);
    call.entry().object.reset();
  });
}
