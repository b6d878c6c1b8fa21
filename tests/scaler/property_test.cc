// Properties of GradScaler over random models, gradients, faults and call sequences.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <memory>

#include "tests/support.h"

namespace headroom {
namespace {

// Parameters of random sizes and types.
struct Model {
  struct Tensor {
    DType weight_type, grad_type;
    std::vector<char> weight, grad;
    size_t count;
  };
  std::vector<Tensor> tensors;
  std::vector<Parameter> parameters;

  explicit Model(size_t count) : tensors(count) {
    for (size_t i = 0; i < count; ++i) {
      Tensor& t = tensors[i];
      t.count = *rc::gen::inRange<size_t>(i == 0 ? 1 : 0, 80);  // at least one gradient
      t.weight_type = *rc::gen::element(DType::kF16, DType::kBF16, DType::kF32);
      t.grad_type = *rc::gen::element(DType::kF16, DType::kBF16, DType::kF32);
      t.weight.resize(t.count * size_of(t.weight_type));
      t.grad.resize(t.count * size_of(t.grad_type));
      const std::vector<float> start = random_values<float>(t.count, static_cast<uint32_t>(i) + 1);
      const auto n = static_cast<int64_t>(t.count);
      convert(view(start), view(t.weight.data(), t.weight_type, n));
      parameters.push_back({"p" + std::to_string(i), view(t.weight.data(), t.weight_type, n),
                            view(t.grad.data(), t.grad_type, n)});
    }
  }

  void backward(float scaled_loss, uint32_t seed) {
    for (Tensor& t : tensors) {
      std::vector<float> g = random_values<float>(t.count, seed++, 0.01);
      for (float& value : g) value *= scaled_loss;
      convert(view(g), view(t.grad.data(), t.grad_type, static_cast<int64_t>(t.count)));
    }
  }

  // Writes inf or NaN to one gradient element. False if the chosen tensor is empty.
  bool poison() {
    const size_t tensor = *rc::gen::inRange<size_t>(0, tensors.size());
    Tensor& t = tensors[tensor];
    if (t.count == 0) return false;
    const size_t element = *rc::gen::inRange<size_t>(0, t.count);
    const float bad = *rc::gen::element(kInf, -kInf, kNan);
    convert(view(&bad, 1), view(t.grad.data() + element * size_of(t.grad_type), t.grad_type, 1));
    return true;
  }
};

// The bytes of all weights and optimizer state, which a step may change.
std::vector<std::vector<char>> state_bytes(const Model& model, const FusedOptimizer& optimizer) {
  std::vector<std::vector<char>> all;
  for (const Model::Tensor& t : model.tensors) all.push_back(t.weight);
  const OptimizerState state = optimizer.state();
  for (const NamedTensor& named : state.tensors) {
    const char* data = static_cast<const char*>(named.tensor.data);
    all.emplace_back(data, data + named.tensor.bytes());
  }
  const auto* steps = reinterpret_cast<const char*>(state.steps.data());
  all.emplace_back(steps, steps + state.steps.size() * sizeof(int64_t));
  return all;
}

std::unique_ptr<FusedOptimizer> random_optimizer(const std::vector<Parameter>& parameters) {
  const Precision precision = {*rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>(), 3};
  switch (*rc::gen::inRange(0, 4)) {
    case 0:
      return std::make_unique<SGD>(parameters, SGDOptions{.lr = 0.1}, precision);
    case 1:
      return std::make_unique<SGD>(
          parameters, SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}, precision);
    case 2:
      return std::make_unique<Adam>(parameters, AdamOptions{}, precision);
    default:
      return std::make_unique<AdamW>(parameters, AdamWOptions{}, precision);
  }
}

RC_GTEST_PROP(ScalerProperty, SkippedStepsChangeNothingAndAppliedStepsAreFinite, ()) {
  Model model(*rc::gen::inRange<size_t>(1, 6));
  const auto optimizer = random_optimizer(model.parameters);
  GradScaler scaler(DynamicScale{.growth_interval = *rc::gen::inRange(1, 5)},
                    {.on_alarm = [](const AlarmReport&) {}});
  for (uint32_t step = 0; step < 20; ++step) {
    model.backward(scaler.scale(1.0f), 100 * step);
    const bool poisoned = *rc::gen::inRange(0, 4) == 0 && model.poison();
    const auto before = state_bytes(model, *optimizer);
    const bool unscale_first = *rc::gen::arbitrary<bool>();
    if (unscale_first) scaler.unscale_(*optimizer);
    const StepReport report =
        scaler.step(*optimizer, {.max_norm = *rc::gen::element(0.0f, 0.5f, 100.0f)});
    RC_ASSERT(!(poisoned && report.applied));
    if (!report.applied) {
      RC_ASSERT(state_bytes(model, *optimizer) == before);
      for (const Model::Tensor& t : model.tensors) {
        RC_ASSERT(t.grad == std::vector<char>(t.grad.size(), 0));
      }
    }
    for (const Parameter& parameter : model.parameters) {
      RC_ASSERT(measure({parameter.weight}).finite());
    }
    const float scale_before = scaler.get_scale();
    scaler.update();
    RC_ASSERT(
        (report.applied ? scaler.get_scale() >= scale_before : scaler.get_scale() <= scale_before));
  }
}

// A weight of 0 under SGD with a learning rate of 1, and the true sum of its gradients.
struct SummedWeight {
  std::vector<float> weight = {0.0f}, grad = {0.0f};
  SGD optimizer{{{"w", view(weight), view(grad)}}, SGDOptions{.lr = 1.0}};
  double sum = 0.0;
  bool unscaled = false;  // scaled gradients must not be added
};

// Scales a loss and adds its gradients to a random subset of the models.
void random_backward(GradScaler& scaler, SummedWeight (&models)[3]) {
  const float scaled = scaler.scale(1.0f);
  for (SummedWeight& model : models) {
    if (model.unscaled || *rc::gen::arbitrary<bool>()) continue;
    const float value = *rc::gen::element(1.0f, 2.0f, 4.0f, 8.0f, kInf);
    model.grad[0] += value * scaled;
    model.sum += value;
  }
}

void step_and_check_sum(GradScaler& scaler, SummedWeight& model) {
  const float before = model.weight[0];
  const bool applied = scaler.step(model.optimizer, {.clear_grads = ClearGrads::kAlways}).applied;
  RC_ASSERT(applied == std::isfinite(model.sum));
  RC_ASSERT(model.weight[0] - before == (applied ? static_cast<float>(-model.sum) : 0.0f));
  model.sum = 0.0;
}

// For losses, unscaling, steps, updates and discarded batches in any order, a step uses the true
// sum of the gradients.
RC_GTEST_PROP(ScalerProperty, StepUsesTheTrueGradientSumInAnyCallOrder, ()) {
  SummedWeight models[3];
  GradScaler scaler(DynamicScale{.init_scale = 1024.0f, .growth_interval = *rc::gen::inRange(1, 3)},
                    {.on_alarm = [](const AlarmReport&) {}});
  scaler.scale(1.0f);
  for (SummedWeight& model : models)
    scaler.step(model.optimizer);  // so that the scaler tracks them
  scaler.update();
  for (int call = 0; call < 40; ++call) {
    SummedWeight& chosen = models[*rc::gen::inRange(0, 3)];
    try {
      switch (*rc::gen::inRange(0, 6)) {
        case 0:
          random_backward(scaler, models);
          break;
        case 1:
          scaler.unscale_(chosen.optimizer);
          chosen.unscaled = true;
          break;
        case 2:
          step_and_check_sum(scaler, chosen);
          break;
        case 3:
        case 4:
          scaler.update();
          for (SummedWeight& model : models) model.unscaled = false;
          break;
        default:
          for (SummedWeight& model : models) {
            model.grad[0] = 0.0f;
            model.sum = 0.0;
            model.unscaled = false;
          }
          scaler.discard();
      }
    } catch (const Error& error) {
      RC_ASSERT(error.code() == ErrorCode::kWrongOrder);
    }
  }
}

RC_GTEST_PROP(ScalerProperty, TrainingBitsDoNotDependOnSimdTargetOrThreadCount, ()) {
  const size_t tensors = *rc::gen::inRange<size_t>(1, 4);
  const std::string before = simd_target();
  const auto target = *rc::gen::elementOf(simd_targets());
  const int threads = *rc::gen::inRange(1, 5);
  Model first(tensors);
  Model second = first;
  for (size_t i = 0; i < tensors; ++i) {  // point the copied views at the copied memory
    second.parameters[i].weight.data = second.tensors[i].weight.data();
    second.parameters[i].grad.data = second.tensors[i].grad.data();
  }
  const auto run = [](Model& model) {
    AdamW optimizer(model.parameters);
    GradScaler scaler;
    for (uint32_t step = 0; step < 5; ++step) {
      model.backward(scaler.scale(1.0f), 100 * step);
      scaler.step(optimizer, {.max_norm = 0.1f});
      scaler.update();
    }
    return std::make_pair(scaler.save(), state_bytes(model, optimizer));
  };
  const auto expected = run(first);
  set_simd_target(target);
  set_num_threads(threads);
  const auto found = run(second);
  set_simd_target(before);
  set_num_threads(0);
  RC_ASSERT(expected == found);
}

}  // namespace
}  // namespace headroom
