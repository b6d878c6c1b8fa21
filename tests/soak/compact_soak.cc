// Trains random models with StateFormat::kHalf and kByte on random gradients, some of which are
// inf, NaN or have a flipped bit, clipped or not, for any number of steps:
//     headroom_compact_soak [STEPS] [SEED]
// Every applied step must have the bits of the model in tests/apply/compact_model.h, also after its
// state was saved and loaded; a skipped step must change nothing. SIMD targets, numbers of threads,
// rules, formats and types alternate.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "decide/verdict.h"
#include "tests/apply/compact_model.h"
#include "tests/apply/saved_state.h"

namespace headroom {
namespace {

using internal::Rule;
using internal::RuleSettings;

struct Failure {
  std::string what;
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t up_to(int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(engine_); }
  bool chance(double rate) { return std::uniform_real_distribution<double>()(engine_) < rate; }
  double normal() { return normal_(engine_); }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
};

// A parameter beside its model.
class Checked {
 public:
  virtual ~Checked() = default;
  virtual Parameter parameter(const std::string& name) const = 0;
  virtual void fill_gradients(double size, Random* random) = 0;
  virtual bool has_finite_gradients() const = 0;
  virtual void step_model(float multiplier, size_t index, uint64_t seed) = 0;
  virtual void check(const std::string& name, const TensorView& values) const = 0;
  virtual void check_weights() const = 0;
  virtual std::vector<unsigned char> bytes() const = 0;
  virtual int64_t model_steps() const = 0;
};

template <typename W, typename G>
class CheckedParameter : public Checked {
 public:
  CheckedParameter(size_t count, const RuleSettings& settings, StateFormat format, Random* random)
      : weights_(count), grads_(count) {
    for (W& weight : weights_) weight = from_float<W>(random->normal());
    for (const W weight : weights_) model_.masters.push_back(static_cast<float>(weight));
    model_.first.resize(count), model_.second.resize(count);
    model_.settings = settings, model_.format = format;
  }

  Parameter parameter(const std::string& name) const override {
    return {name, view(weights_), view(grads_)};
  }
  // Neighbours differ by up to 2^40, so that groups of moments have values at all their limits.
  void fill_gradients(double size, Random* random) override {
    const bool spread = random->chance(0.3);
    for (G& grad : grads_) {
      const auto down = static_cast<int>(spread ? random->up_to(40) : 0);
      grad = from_float<G>(random->chance(0.05) ? 0.0 : std::ldexp(random->normal() * size, -down));
    }
  }
  bool has_finite_gradients() const override {
    return std::all_of(grads_.begin(), grads_.end(),
                       [](G grad) { return std::isfinite(static_cast<float>(grad)); });
  }
  void step_model(float multiplier, size_t index, uint64_t seed) override {
    if (weights_.empty()) return;  // counts no steps
    model_.step(grads_, multiplier, index, seed);
  }
  void check(const std::string& name, const TensorView& values) const override {
    const bool second = name.ends_with("exp_avg_sq");
    const auto& expected = name.ends_with("master") ? model_.masters
                           : second                 ? model_.second
                                                    : model_.first;
    const auto* const found = static_cast<const float*>(values.data);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (std::bit_cast<uint32_t>(found[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
      throw Failure{name + "[" + std::to_string(i) + "] is " + std::to_string(found[i]) +
                    " and in the model " + std::to_string(expected[i])};
    }
  }
  void check_weights() const override {
    for (size_t i = 0; i < weights_.size(); ++i) {
      float expected = model_.masters[i];
      if constexpr (!std::is_same_v<W, float>) expected = model_weight<W>(expected);
      if (static_cast<float>(weights_[i]) != expected) throw Failure{"a weight is not its master"};
    }
  }
  std::vector<unsigned char> bytes() const override {
    std::vector<unsigned char> all = bytes_of(weights_);
    const auto grads = bytes_of(grads_);
    all.insert(all.end(), grads.begin(), grads.end());
    return all;
  }
  int64_t model_steps() const override { return model_.steps; }

 private:
  mutable std::vector<W> weights_;
  mutable std::vector<G> grads_;
  CompactModel<W> model_;
};

std::unique_ptr<Checked> random_parameter(const RuleSettings& settings, StateFormat format,
                                          Random* random) {
  const auto count = static_cast<size_t>(random->up_to(random->chance(0.1) ? 3000 : 80));
  const auto make = [&]<typename W, typename G>() -> std::unique_ptr<Checked> {
    return std::make_unique<CheckedParameter<W, G>>(count, settings, format, random);
  };
  switch (random->up_to(4)) {
    case 0:
      return make.template operator()<f16, f16>();
    case 1:
      return make.template operator()<bf16, bf16>();
    case 2:
      return make.template operator()<bf16, float>();
    case 3:
      return make.template operator()<float, f16>();
    default:
      return make.template operator()<float, float>();
  }
}

RuleSettings random_settings(Random* random) {
  const double lr = 0.0001 * static_cast<double>(1 + random->up_to(100));
  const double decay = random->chance(0.5) ? 0.1 : 0.0;
  switch (random->up_to(4)) {
    case 0:
      return {.rule = Rule::kSgd, .lr = lr, .weight_decay = decay};
    case 1:
      return {.rule = Rule::kSgdMomentum,
              .nesterov = random->chance(0.5),
              .lr = lr,
              .weight_decay = decay,
              .momentum = 0.9};
    case 2:
      return {.rule = Rule::kLion,
              .decoupled = true,
              .lr = lr,
              .weight_decay = decay,
              .beta1 = 0.9,
              .beta2 = 0.99};
    default:
      return {.rule = Rule::kAdam,
              .decoupled = random->chance(0.5),
              .lr = lr,
              .weight_decay = decay,
              .beta1 = 0.9,
              .beta2 = random->chance(0.5) ? 0.999 : 0.95,
              .eps = 1e-8};
  }
}

std::unique_ptr<FusedOptimizer> optimizer_of(const RuleSettings& s,
                                             const std::vector<Parameter>& parameters,
                                             const Precision& precision) {
  if (s.rule == Rule::kLion) {
    const LionOptions options{
        .lr = s.lr, .beta1 = s.beta1, .beta2 = s.beta2, .weight_decay = s.weight_decay};
    return std::make_unique<Lion>(parameters, options, precision);
  }
  if (s.rule != Rule::kAdam) {
    const SGDOptions options{
        .lr = s.lr, .momentum = s.momentum, .weight_decay = s.weight_decay, .nesterov = s.nesterov};
    return std::make_unique<SGD>(parameters, options, precision);
  }
  if (s.decoupled) {
    const AdamWOptions options{.lr = s.lr,
                               .beta1 = s.beta1,
                               .beta2 = s.beta2,
                               .eps = s.eps,
                               .weight_decay = s.weight_decay};
    return std::make_unique<AdamW>(parameters, options, precision);
  }
  const AdamOptions options{
      .lr = s.lr, .beta1 = s.beta1, .beta2 = s.beta2, .eps = s.eps, .weight_decay = s.weight_decay};
  return std::make_unique<Adam>(parameters, options, precision);
}

class Training {
 public:
  explicit Training(uint64_t seed)
      : random_(seed),
        settings_(random_settings(&random_)),
        precision_{.seed = seed,
                   .state = random_.chance(0.5) ? StateFormat::kByte : StateFormat::kHalf},
        injector_(parse_faults(faults()), seed),
        scaler_(DynamicScale{.growth_interval = 10}, {.on_alarm = [](const AlarmReport&) {}}) {
    const std::vector<std::string> targets = simd_targets();
    const int64_t last = static_cast<int64_t>(targets.size()) - 1;
    set_simd_target(targets[static_cast<size_t>(random_.up_to(last))]);
    set_num_threads(static_cast<int>(1 + random_.up_to(2)));
    bool any = false;  // step() refuses an optimizer none of whose parameters has elements
    for (int64_t i = random_.up_to(4); i >= 0 || !any; --i) {
      checked_.push_back(random_parameter(settings_, precision_.state, &random_));
      any = any || checked_.back()->parameter("").weight.count > 0;
    }
    optimizer_ = optimizer_of(settings_, parameters(), precision_);
  }

  bool step() {
    const auto scale = static_cast<double>(scaler_.scale(1.0f));
    const double size = std::exp2(-static_cast<double>(random_.up_to(12)));
    for (auto& each : checked_) each->fill_gradients(size * scale, &random_);
    injector_.inject(++steps_, optimizer_->parameters());
    const float max_norm = random_.chance(0.3) ? 0.01f : 0.0f;
    const auto before = snapshot();
    const StepReport report =
        scaler_.step(*optimizer_, {.max_norm = max_norm, .clear_grads = ClearGrads::kNever});
    scaler_.update();
    if (report.applied) {
      check_applied(report);
    } else if (snapshot() != before) {
      throw Failure{"a skipped step changed weights, gradients or state"};
    }
    clipped += report.applied && report.clip_factor < 1.0;
    if (random_.chance(0.02)) save_and_load();
    return report.applied;
  }

  int64_t clipped = 0, loaded = 0;

 private:
  // A flipped bit can make a gradient of 2^60: only weights of a rule that divides by the size of
  // gradients stay numbers.
  std::string faults() const {
    const bool divides = settings_.rule == Rule::kAdam || settings_.rule == Rule::kLion;
    return std::string("overflow:p=0.01,nan:p=0.005") + (divides ? ",flip:p=0.02" : "");
  }

  std::vector<Parameter> parameters() const {
    std::vector<Parameter> all;
    for (size_t i = 0; i < checked_.size(); ++i) {
      all.push_back(checked_[i]->parameter("p" + std::to_string(i)));
    }
    return all;
  }

  std::vector<std::vector<unsigned char>> snapshot() const {
    std::vector<std::vector<unsigned char>> all;
    for (const auto& each : checked_) all.push_back(each->bytes());
    const SavedState state(optimizer_->state());
    for (const auto& values : state.values) all.push_back(bytes_of(values));
    all.push_back(bytes_of(state.steps));
    return all;
  }

  void check_applied(const StepReport& report) {
    const double factor = static_cast<double>(internal::inverse(report.scale));
    for (size_t i = 0; i < checked_.size(); ++i) {
      if (!checked_[i]->has_finite_gradients()) throw Failure{"an inf or NaN was applied"};
      checked_[i]->step_model(static_cast<float>(factor * report.clip_factor), i, precision_.seed);
    }
    check_state();
  }

  void check_state() const {
    const OptimizerState state = optimizer_->state();
    for (const NamedTensor& tensor : state.tensors) {
      checked_[tensor.parameter]->check(tensor.name, tensor.tensor);
    }
    for (size_t i = 0; i < checked_.size(); ++i) {
      checked_[i]->check_weights();
      if (state.steps[i] != checked_[i]->model_steps()) throw Failure{"the step count is wrong"};
    }
  }

  // Goes on with another optimizer, which must not differ.
  void save_and_load() {
    SavedState saved(optimizer_->state());
    optimizer_ = optimizer_of(settings_, parameters(), precision_);
    optimizer_->load_state(saved.state());
    check_state();
    ++loaded;
  }

  Random random_;
  RuleSettings settings_;
  Precision precision_;
  Injector injector_;
  GradScaler scaler_;
  int64_t steps_ = 0;
  std::vector<std::unique_ptr<Checked>> checked_;
  std::unique_ptr<FusedOptimizer> optimizer_;
};

int soak(int64_t steps, uint64_t seed) {
  constexpr int64_t kStepsPerModel = 100;
  int64_t done = 0, applied = 0, clipped = 0, loaded = 0;
  for (uint64_t model = 0; done < steps; ++model) {
    Training training(seed * 1000003 + model);
    for (int64_t i = 0; i < kStepsPerModel && done < steps; ++i, ++done) {
      try {
        applied += training.step();
      } catch (const Failure& failure) {
        std::printf("model %llu, step %lld: %s\n", static_cast<unsigned long long>(model),
                    static_cast<long long>(i), failure.what.c_str());
        return 1;
      }
    }
    clipped += training.clipped, loaded += training.loaded;
  }
  std::printf(
      "%lld steps, %lld applied, %lld of them clipped, %lld loads: every applied step equals the "
      "model of its format, skipped steps changed nothing\n",
      static_cast<long long>(done), static_cast<long long>(applied),
      static_cast<long long>(clipped), static_cast<long long>(loaded));
  // Each kind of step has to be common.
  const int64_t skipped = done - applied;
  return 2 * applied > done && 100 * skipped > done && 10 * clipped > done ? 0 : 1;
}

}  // namespace
}  // namespace headroom

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 100000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  return headroom::soak(steps, seed);
}
