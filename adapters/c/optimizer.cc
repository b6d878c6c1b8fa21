#include "adapters/c/handles.h"
#include "adapters/c/structs.h"

using namespace headroom::c;
using headroom::AdamOptions;
using headroom::AdamWOptions;
using headroom::GradAccumulator;
using headroom::GroupedOptimizer;
using headroom::Optimizer;
using headroom::Parameter;
using headroom::Precision;
using headroom::SGDOptions;

namespace {

/// An optimizer of another language.
class CallbackOptimizer : public Optimizer {
 public:
  CallbackOptimizer(std::vector<Parameter> parameters, const hr_optimizer_callbacks& callbacks)
      : Optimizer(std::move(parameters)), callbacks_(callbacks) {}

  void apply(float multiplier, bool clear_grads) override {
    int32_t failed = 0;
    guard("apply", [&] { failed = callbacks_.apply(multiplier, clear_grads, callbacks_.user); });
    if (failed == 0) return;
    throw Failure{HR_ERROR_CALLBACK, "the optimizer's apply callback returned " +
                                         std::to_string(failed) +
                                         "; look into it, the step is not counted."};
  }

  void skipped(const std::string& culprit) override {
    if (callbacks_.skipped == nullptr) return;
    guard("skipped", [&] { callbacks_.skipped(culprit.c_str(), callbacks_.user); });
  }

 private:
  template <typename Call>
  static void guard(const char* name, const Call& call) {
    call_and_catch(call, [&] {
      throw Failure{HR_ERROR_CALLBACK, "the optimizer's " + std::string(name) +
                                           " callback left by an exception; let none out of it."};
    });
  }

  hr_optimizer_callbacks callbacks_;
};

hr_sgd_options c_options(const SGDOptions& options) {
  return {
      sizeof(hr_sgd_options), options.lr, options.momentum, options.dampening, options.weight_decay,
      options.nesterov,       0};
}

template <typename Adam>
hr_adam_options c_options(const Adam& options) {
  return {sizeof(hr_adam_options), options.lr,  options.beta1,
          options.beta2,           options.eps, options.weight_decay};
}

SGDOptions options_from(const hr_sgd_options* given, SGDOptions defaults) {
  const hr_sgd_options options = taken(given, c_options(defaults), "options");
  return {options.lr, options.momentum, options.dampening, options.weight_decay,
          options.nesterov != 0};
}

template <typename Adam>
Adam options_from(const hr_adam_options* given, Adam defaults) {
  const hr_adam_options options = taken(given, c_options(defaults), "options");
  return {options.lr, options.beta1, options.beta2, options.eps, options.weight_decay};
}

hr_precision default_precision() {
  const Precision precision;
  return {sizeof(hr_precision), precision.seed, precision.master_weights,
          precision.stochastic_rounding};
}

template <typename Made, typename CppOptions, typename COptions>
void create(const hr_parameter* parameters, size_t count, const COptions* options,
            const hr_precision* precision, hr_optimizer** optimizer) {
  need(optimizer, "optimizer");
  const hr_precision given = taken(precision, default_precision(), "precision");
  auto entry = std::make_shared<OptimizerEntry>();
  entry->object = std::make_unique<Made>(
      parameters_from(parameters, count), options_from(options, CppOptions{}),
      Precision{given.master_weights != 0, given.stochastic_rounding != 0, given.seed});
  *optimizer = optimizers().add(std::move(entry));
}

// Calls `use` with the optimizer as SGD, or as Adam or AdamW, whichever it is.
template <typename Use>
void with_sgd(OptimizerCall& call, const Use& use) {
  use(call.as<GroupedOptimizer<SGDOptions>>("SGD"));
}
template <typename Use>
void with_adam(OptimizerCall& call, const Use& use) {
  if (auto* const adamw = dynamic_cast<GroupedOptimizer<AdamWOptions>*>(&*call)) return use(*adamw);
  use(call.as<GroupedOptimizer<AdamOptions>>("Adam or AdamW"));
}

}  // namespace

hr_status hr_sgd_options_init(hr_sgd_options* options, size_t size) {
  return guarded(__func__, [&] {
    check_size<hr_sgd_options>(size, "options");
    give(c_options(SGDOptions{}), need(options, "options"), size);
  });
}

hr_status hr_adam_options_init(hr_adam_options* options, size_t size) {
  return guarded(__func__, [&] {
    check_size<hr_adam_options>(size, "options");
    give(c_options(AdamOptions{}), need(options, "options"), size);
  });
}

hr_status hr_adamw_options_init(hr_adam_options* options, size_t size) {
  return guarded(__func__, [&] {
    check_size<hr_adam_options>(size, "options");
    give(c_options(AdamWOptions{}), need(options, "options"), size);
  });
}

hr_status hr_precision_init(hr_precision* precision, size_t size) {
  return guarded(__func__, [&] {
    check_size<hr_precision>(size, "precision");
    give(default_precision(), need(precision, "precision"), size);
  });
}

hr_status hr_sgd_create(const hr_parameter* parameters, size_t count, const hr_sgd_options* options,
                        const hr_precision* precision, hr_optimizer** optimizer) {
  return guarded(__func__, [&] {
    create<headroom::SGD, SGDOptions>(parameters, count, options, precision, optimizer);
  });
}

hr_status hr_adam_create(const hr_parameter* parameters, size_t count,
                         const hr_adam_options* options, const hr_precision* precision,
                         hr_optimizer** optimizer) {
  return guarded(__func__, [&] {
    create<headroom::Adam, AdamOptions>(parameters, count, options, precision, optimizer);
  });
}

hr_status hr_adamw_create(const hr_parameter* parameters, size_t count,
                          const hr_adam_options* options, const hr_precision* precision,
                          hr_optimizer** optimizer) {
  return guarded(__func__, [&] {
    create<headroom::AdamW, AdamWOptions>(parameters, count, options, precision, optimizer);
  });
}

hr_status hr_optimizer_create(const hr_parameter* parameters, size_t count,
                              const hr_optimizer_callbacks* callbacks, hr_optimizer** optimizer) {
  return guarded(__func__, [&] {
    need(optimizer, "optimizer");
    const hr_optimizer_callbacks given = taken(need(callbacks, "callbacks"), {}, "callbacks");
    if (given.apply == nullptr) {
      throw Failure{HR_ERROR_NULL, "'callbacks->apply' is null; pass a function."};
    }
    auto entry = std::make_shared<OptimizerEntry>();
    entry->object = std::make_unique<CallbackOptimizer>(parameters_from(parameters, count), given);
    *optimizer = optimizers().add(std::move(entry));
  });
}

hr_status hr_accumulator_create(const hr_parameter* parameters, size_t count,
                                hr_optimizer** accumulator) {
  return guarded(__func__, [&] {
    need(accumulator, "accumulator");
    auto entry = std::make_shared<OptimizerEntry>();
    auto made = std::make_unique<GradAccumulator>(parameters_from(parameters, count));
    entry->accumulator = made.get();
    entry->object = std::move(made);
    *accumulator = optimizers().add(std::move(entry));
  });
}

hr_status hr_accumulator_summed(hr_optimizer* accumulator, size_t index, hr_parameter* parameter) {
  return guarded(__func__, [&] {
    need(parameter, "parameter");
    OptimizerCall call(accumulator, "accumulator");
    const auto& summed = call.as<GradAccumulator>("an accumulator").summed();
    *parameter = parameter_from(at(summed, index, "parameters"));
  });
}

hr_status hr_accumulator_step(hr_optimizer* accumulator, hr_optimizer* optimizer,
                              const hr_step_options* options, hr_report* report) {
  return guarded(__func__, [&] {
    check_to_fill(report, "report");
    const headroom::StepOptions given = step_options_from(options);
    OptimizerCall sums(accumulator, "accumulator");
    auto& sum = sums.as<GradAccumulator>("an accumulator");
    if (const auto entry = optimizers().find(need(optimizer, "optimizer"));
        entry != nullptr && entry->accumulator != nullptr) {
      throw Failure{HR_ERROR_UNSUPPORTED,
                    "an accumulator cannot be stepped by another; pass the "
                    "optimizer that was made on its sums."};
    }
    CircleCall stepped(&sums.entry().circle, optimizer);
    give(report_from(sum.step(*stepped, given)), report);
  });
}

hr_status hr_optimizer_destroy(hr_optimizer* optimizer) {
  return guarded(__func__, [&] {
    OptimizerCall call(optimizer);
    optimizers().remove(optimizer);
    call.entry().object.reset();
  });
}

hr_status hr_sgd_add_group(hr_optimizer* optimizer, const hr_parameter* parameters, size_t count,
                           const hr_sgd_options* options, size_t* group) {
  return guarded(__func__, [&] {
    OptimizerCall call(optimizer);
    with_sgd(call, [&](auto& sgd) {
      const size_t made =
          sgd.add_group(parameters_from(parameters, count), options_from(options, SGDOptions{}));
      if (group != nullptr) *group = made;
    });
  });
}

hr_status hr_sgd_set_options(hr_optimizer* optimizer, size_t group, const hr_sgd_options* options) {
  return guarded(__func__, [&] {
    need(options, "options");
    OptimizerCall call(optimizer);
    with_sgd(call, [&](auto& sgd) { sgd.set_options(options_from(options, SGDOptions{}), group); });
  });
}

hr_status hr_sgd_get_options(hr_optimizer* optimizer, size_t group, hr_sgd_options* options) {
  return guarded(__func__, [&] {
    check_to_fill(need(options, "options"), "options");
    OptimizerCall call(optimizer);
    with_sgd(call, [&](auto& sgd) { give(c_options(sgd.options(group)), options); });
  });
}

hr_status hr_adam_add_group(hr_optimizer* optimizer, const hr_parameter* parameters, size_t count,
                            const hr_adam_options* options, size_t* group) {
  return guarded(__func__, [&] {
    OptimizerCall call(optimizer);
    with_adam(call, [&](auto& adam) {
      using Options = std::decay_t<decltype(adam.options())>;
      const size_t made =
          adam.add_group(parameters_from(parameters, count), options_from(options, Options{}));
      if (group != nullptr) *group = made;
    });
  });
}

hr_status hr_adam_set_options(hr_optimizer* optimizer, size_t group,
                              const hr_adam_options* options) {
  return guarded(__func__, [&] {
    need(options, "options");
    OptimizerCall call(optimizer);
    with_adam(call, [&](auto& adam) {
      using Options = std::decay_t<decltype(adam.options())>;
      adam.set_options(options_from(options, Options{}), group);
    });
  });
}

hr_status hr_adam_get_options(hr_optimizer* optimizer, size_t group, hr_adam_options* options) {
  return guarded(__func__, [&] {
    check_to_fill(need(options, "options"), "options");
    OptimizerCall call(optimizer);
    with_adam(call, [&](auto& adam) { give(c_options(adam.options(group)), options); });
  });
}
