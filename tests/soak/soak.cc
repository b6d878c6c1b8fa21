// Trains random models on random gradients, some of which are inf or NaN, for any number of steps:
//     headroom_soak [STEPS] [SEED]
// Every applied step must agree with the same step in FP64, a skipped step must change nothing but
// the scale, and memory must not grow.
#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace hr = headroom;

namespace {

constexpr const char* kFaults = "overflow:p=0.01,nan:p=0.001";

struct Failure {
  std::string what;
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t up_to(int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(engine_); }
  double unit() { return std::uniform_real_distribution<double>(0.0, 1.0)(engine_); }
  double normal() { return normal_(engine_); }
  bool chance(double rate) { return unit() < rate; }
  hr::DType dtype() { return static_cast<hr::DType>(up_to(2)); }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
};

// A tensor of any float type whose elements are read and written as doubles.
class Array {
 public:
  Array(hr::DType dtype, int64_t count) : memory_(static_cast<size_t>(count) * hr::size_of(dtype)) {
    view_ = hr::view(static_cast<void*>(memory_.data()), dtype, count);
  }
  const hr::TensorView& view() const { return view_; }
  const std::vector<unsigned char>& bytes() const { return memory_; }
  double get(int64_t i) const {
    const unsigned char* at = memory_.data() + static_cast<size_t>(i) * hr::size_of(view_.dtype);
    const auto read = [&](auto x) {
      std::memcpy(&x, at, sizeof(x));
      return static_cast<double>(static_cast<float>(x));
    };
    if (view_.dtype == hr::DType::kF16) return read(hr::f16());
    if (view_.dtype == hr::DType::kBF16) return read(hr::bf16());
    return read(0.0f);
  }
  void set(int64_t i, double value) {
    unsigned char* at = memory_.data() + static_cast<size_t>(i) * hr::size_of(view_.dtype);
    const auto write = [&](auto x) { std::memcpy(at, &x, sizeof(x)); };
    if (view_.dtype == hr::DType::kF16) return write(hr::f16(static_cast<float>(value)));
    if (view_.dtype == hr::DType::kBF16) return write(hr::bf16(static_cast<float>(value)));
    write(static_cast<float>(value));
  }

 private:
  std::vector<unsigned char> memory_;
  hr::TensorView view_;
};

// The weight and moments of one element, in FP64.
struct Element {
  double weight, first, second;
};

// An optimizer's update rule in FP64.
struct Rule {
  bool adam = false, decoupled = false, nesterov = false;
  double lr = 0.01, decay = 0.0, momentum = 0.0, dampening = 0.0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;

  Element next(Element e, double grad, int64_t steps) const {
    if (adam) {
      if (decoupled) e.weight *= 1.0 - lr * decay;
      if (!decoupled) grad += decay * e.weight;
      e.first = beta1 * e.first + (1.0 - beta1) * grad;
      e.second = beta2 * e.second + (1.0 - beta2) * grad * grad;
      const auto t = static_cast<double>(steps + 1);
      const double root = std::sqrt(e.second / (1.0 - std::pow(beta2, t))) + eps;
      e.weight -= lr / (1.0 - std::pow(beta1, t)) * e.first / root;
      return e;
    }
    grad += decay * e.weight;
    if (momentum > 0.0) {
      e.first = steps == 0 ? grad : momentum * e.first + (1.0 - dampening) * grad;
      grad = nesterov ? grad + momentum * e.first : e.first;
    }
    e.weight -= lr * grad;
    return e;
  }

  // The change of the weight if no terms cancelled, which bounds the rounding error in FP32.
  double uncancelled_change(const Element& e, double grad, int64_t steps) const {
    const Element size = {std::fabs(e.weight), std::fabs(e.first), e.second};
    return size.weight - next(size, std::fabs(grad), steps).weight;
  }
};

// A random model with an optimizer and a scaler whose every step is checked.
class CheckedTraining {
 public:
  explicit CheckedTraining(uint64_t seed)
      : random_(seed), injector_(hr::parse_faults(kFaults), seed) {
    const auto tensors = 1 + random_.up_to(5);
    std::vector<hr::Parameter> parameters;
    for (int64_t i = 0; i < tensors; ++i) {
      const int64_t count =
          random_.chance(0.1) ? 0 : 1 + random_.up_to(random_.chance(0.2) ? 3000 : 60);
      weights_.push_back(std::make_unique<Array>(random_.dtype(), count));
      grads_.push_back(std::make_unique<Array>(random_.dtype(), count));
      for (int64_t k = 0; k < count; ++k) weights_.back()->set(k, random_.normal());
      parameters.push_back(
          {"p" + std::to_string(i), weights_.back()->view(), grads_.back()->view()});
    }
    // At least one parameter has elements.
    weights_.push_back(std::make_unique<Array>(hr::DType::kF32, 3));
    grads_.push_back(std::make_unique<Array>(hr::DType::kF16, 3));
    parameters.push_back({"last", weights_.back()->view(), grads_.back()->view()});
    make_optimizer(parameters);
    const auto& presets = hr::presets();
    hr::ScalePolicy policy = hr::preset(
        presets[static_cast<size_t>(random_.up_to(static_cast<int64_t>(presets.size()) - 1))].name);
    const auto interval = static_cast<double>(1 + random_.up_to(20));
    if (policy.if_static() == nullptr) policy.set("growth_interval", interval);
    policy.set("on_overflow", 0);
    scaler_ = std::make_unique<hr::GradScaler>(
        policy, hr::ScalerOptions{.on_alarm = [](const hr::AlarmReport&) {}});
  }

  bool step() {
    const float scaled_loss = scaler_->scale(1.0f);
    const double size = std::exp2(-static_cast<double>(random_.up_to(12)));
    for (auto& grad : grads_) {
      for (int64_t k = 0; k < grad->view().count; ++k) {
        grad->set(k, random_.normal() * size * static_cast<double>(scaled_loss));
      }
    }
    injector_.inject(++steps_, optimizer_->parameters());
    const float max_norm = random_.chance(0.3) ? 0.01f : 0.0f;
    const std::vector<std::vector<unsigned char>> before = snapshot();
    const std::vector<std::vector<Element>> elements = all_elements();
    const bool finite = gradients_are_finite();
    const hr::StepReport report =
        scaler_->step(*optimizer_, {.max_norm = max_norm, .clear_grads = hr::ClearGrads::kNever});
    if (report.applied != finite) throw Failure{"applied is " + std::to_string(report.applied)};
    if (!finite) {
      if (snapshot() != before) throw Failure{"a skipped step changed weights, gradients or state"};
    } else {
      check_applied(elements, report, max_norm);
    }
    scaler_->update();
    if (random_.chance(0.02)) round_trip_scaler();
    return finite;
  }

 private:
  void make_optimizer(const std::vector<hr::Parameter>& parameters) {
    rule_.lr = 0.001 + 0.05 * random_.unit();
    rule_.decay = random_.chance(0.5) ? 0.1 : 0.0;
    switch (random_.up_to(3)) {
      case 0:
        optimizer_ = std::make_unique<hr::SGD>(
            parameters, hr::SGDOptions{.lr = rule_.lr, .weight_decay = rule_.decay});
        return;
      case 1:
        rule_.momentum = 0.9;
        rule_.nesterov = random_.chance(0.5);
        rule_.dampening = rule_.nesterov ? 0.0 : 0.3;
        optimizer_ = std::make_unique<hr::SGD>(
            parameters,
            hr::SGDOptions{rule_.lr, rule_.momentum, rule_.dampening, rule_.decay, rule_.nesterov});
        return;
      case 2:
        rule_.adam = true;
        optimizer_ = std::make_unique<hr::Adam>(
            parameters, hr::AdamOptions{.lr = rule_.lr, .weight_decay = rule_.decay});
        return;
      default:
        rule_.adam = rule_.decoupled = true;
        optimizer_ = std::make_unique<hr::AdamW>(
            parameters, hr::AdamWOptions{.lr = rule_.lr, .weight_decay = rule_.decay});
    }
  }

  // A step must be applied if and only if all gradients in memory are finite.
  bool gradients_are_finite() const {
    for (const auto& grad : grads_) {
      for (int64_t k = 0; k < grad->view().count; ++k) {
        if (!std::isfinite(grad->get(k))) return false;
      }
    }
    return true;
  }

  // The bytes of all weights, gradients and optimizer state.
  std::vector<std::vector<unsigned char>> snapshot() const {
    std::vector<std::vector<unsigned char>> all;
    for (const auto& weight : weights_) all.push_back(weight->bytes());
    for (const auto& grad : grads_) all.push_back(grad->bytes());
    const hr::OptimizerState state = optimizer_->state();
    for (const hr::NamedTensor& tensor : state.tensors) {
      const auto* data = static_cast<const unsigned char*>(tensor.tensor.data);
      all.emplace_back(data, data + tensor.tensor.bytes());
    }
    const auto* steps = reinterpret_cast<const unsigned char*>(state.steps.data());
    all.emplace_back(steps, steps + 8 * state.steps.size());
    return all;
  }

  std::vector<std::vector<Element>> all_elements() const {
    std::vector<std::vector<Element>> all;
    for (size_t i = 0; i < weights_.size(); ++i) {
      const float* const master = optimizer_->master(i);
      all.emplace_back();
      for (int64_t k = 0; k < weights_[i]->view().count; ++k) {
        all.back().push_back({static_cast<double>(master[k]), 0.0, 0.0});
      }
    }
    for (const hr::NamedTensor& tensor : optimizer_->state().tensors) {
      const auto* data = static_cast<const float*>(tensor.tensor.data);
      for (int64_t k = 0; k < tensor.tensor.count; ++k) {
        Element& element = all[tensor.parameter][static_cast<size_t>(k)];
        if (tensor.name.ends_with("exp_avg") || tensor.name.ends_with("momentum")) {
          element.first = data[k];
        }
        if (tensor.name.ends_with("exp_avg_sq")) element.second = data[k];
      }
    }
    return all;
  }

  void check_applied(const std::vector<std::vector<Element>>& before, const hr::StepReport& report,
                     double max_norm) const {
    double squares = 0.0;
    for (const auto& grad : grads_) {
      for (int64_t k = 0; k < grad->view().count; ++k) {
        const double g = grad->get(k) / static_cast<double>(report.scale);
        squares += g * g;
      }
    }
    const double norm = std::sqrt(squares);
    if (std::fabs(norm - report.grad_norm) > 1e-6 * norm) throw Failure{"the norm is wrong"};
    const double clip = max_norm > 0.0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
    for (size_t i = 0; i < weights_.size(); ++i) {
      const float* const master = optimizer_->master(i);
      for (int64_t k = 0; k < weights_[i]->view().count; ++k) {
        const Element& old = before[i][static_cast<size_t>(k)];
        const double grad = grads_[i]->get(k) / static_cast<double>(report.scale) * clip;
        const Element now = rule_.next(old, grad, optimizer_->steps(i) - 1);
        const double change = std::fabs(now.weight - old.weight);
        const double bound = rule_.uncancelled_change(old, grad, optimizer_->steps(i) - 1);
        const double allowed = 1e-4 * change + 4e-7 * (std::fabs(old.weight) + bound) + 1e-30;
        if (!(std::fabs(now.weight - static_cast<double>(master[k])) <= allowed)) {
          throw Failure{"p" + std::to_string(i) + "[" + std::to_string(k) + "] is " +
                        std::to_string(master[k]) + " and not " + std::to_string(now.weight)};
        }
        Array rounded(weights_[i]->view().dtype, 1);
        rounded.set(0, master[k]);
        if (rounded.get(0) != weights_[i]->get(k))
          throw Failure{"a weight is not its rounded master"};
      }
    }
  }

  // Saves and loads the scaler, which must not change it.
  void round_trip_scaler() {
    const std::string saved = scaler_->save();
    scaler_->load(saved);
    if (scaler_->save() != saved) throw Failure{"saving and loading changed the scaler"};
  }

  Random random_;
  hr::Injector injector_;
  int64_t steps_ = 0;
  Rule rule_;
  std::vector<std::unique_ptr<Array>> weights_, grads_;
  std::unique_ptr<hr::FusedOptimizer> optimizer_;
  std::unique_ptr<hr::GradScaler> scaler_;
};

// 0 under sanitizers, which do not return freed memory.
double resident_megabytes() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 0.0;
#endif
  std::ifstream file("/proc/self/statm");
  double pages = 0.0;
  file >> pages >> pages;
  return pages * 4096.0 / 1e6;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 100000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  constexpr int64_t kStepsPerModel = 100;
  int64_t done = 0, skipped = 0;
  double early = 0.0;
  for (uint64_t model = 0; done < steps; ++model) {
    CheckedTraining training(seed * 1000003 + model);
    for (int64_t i = 0; i < kStepsPerModel && done < steps; ++i, ++done) {
      try {
        skipped += !training.step();
      } catch (const Failure& failure) {
        std::printf("model %llu, step %lld: %s\n", static_cast<unsigned long long>(model),
                    static_cast<long long>(i), failure.what.c_str());
        return 1;
      }
    }
    if (early == 0.0 && done >= steps / 5) early = resident_megabytes();
  }
  const double grown = resident_megabytes() - early;
  std::printf(
      "%lld steps, %lld of them skipped; applied steps agree with FP64, skipped steps changed "
      "nothing; memory grew by %.1f MB after the first fifth\n",
      static_cast<long long>(done), static_cast<long long>(skipped), grown);
  return grown < 8.0 ? 0 : 1;
}
