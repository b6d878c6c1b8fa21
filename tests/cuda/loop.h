// A training loop that runs on the CPU or on the device, to compare their results bit for bit.
#ifndef HEADROOM_TESTS_CUDA_LOOP_H_
#define HEADROOM_TESTS_CUDA_LOOP_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "scaler/scaler.h"
#include "tests/cuda/support.h"

namespace headroom {

inline constexpr Device kDevice{DeviceType::kCUDA, 0};

// One optimizer and its scaler, on the CPU or on the device. `log` records reports, alarms and
// saved states for comparison.
template <typename Optimizer = AdamW, typename Options = AdamWOptions>
class Loop {
 public:
  Loop(bool cuda, const ScalePolicy& policy, const Options& options = {}, bool enabled = true,
       DType type = DType::kF16, const Precision& precision = {})
      : cuda_(cuda),
        scaler(policy, {.enabled = enabled,
                        .device = cuda ? kDevice : Device{},
                        .on_alarm = [this](const AlarmReport& alarm) {
                          log += "alarm " + alarm.sentence + "\n";
                        }}) {
    std::vector<Parameter> parameters;
    for (const int64_t count : {1, 70, 8192, 20003}) {
      const auto seed = static_cast<unsigned>(count);
      weights_.push_back(std::make_unique<HostTensor>(type, count, seed));
      grads_.push_back(std::make_unique<HostTensor>(type, count, seed + 1));
      if (cuda) {
        device_weights_.push_back(std::make_unique<DeviceCopy>(weights_.back()->view()));
        device_grads_.push_back(std::make_unique<DeviceCopy>(grads_.back()->view()));
      }
      parameters.push_back(
          {"p" + std::to_string(count), weight(grads_.size() - 1), grad(grads_.size() - 1)});
    }
    optimizer = std::make_unique<Optimizer>(parameters, options, precision);
    loss_ = std::make_unique<HostTensor>(DType::kF32, 1, 0);
    loss_->set(0, 1.0);
    device_loss_ = cuda ? std::make_unique<DeviceCopy>(loss_->view()) : nullptr;
    device_scaled_ = cuda ? std::make_unique<DeviceCopy>(loss_->view()) : nullptr;
  }

  // Scales the loss and writes gradients of this size, with `bad` in the middle of the gradient of
  // parameter `where`, or nowhere for -1.
  void backward(unsigned seed, double size, int where = -1, double bad = 0.0) {
    scale();
    fill(seed, size, where, bad);
  }
  void fill(unsigned seed, double size, int where = -1, double bad = 0.0) {
    for (size_t i = 0; i < grads_.size(); ++i) {
      grads_[i]->refill_exactly(seed + static_cast<unsigned>(i), size);
      if (where == static_cast<int>(i)) grads_[i]->set(grads_[i]->view().count / 2, bad);
      if (cuda_) device_grads_[i]->write(grads_[i]->view());
    }
  }
  void scale() {
    if (cuda_) {
      scaler.scale(device_loss_->view(), device_scaled_->view());
    } else {
      scaler.scale(1.0f);
    }
  }
  void step(const StepOptions& options = {}, const internal::ExternalScale& external = {}) {
    const StepReport now = internal::ScalerAccess::step(scaler, *optimizer, options, external);
    EXPECT_EQ(now.pending, cuda_);
    const StepReport report = scaler.report(*optimizer);
    EXPECT_FALSE(report.pending);
    char numbers[200];
    std::snprintf(numbers, sizeof(numbers), " norm %.6g clip %.6g amax %.9g steps %lld of %lld",
                  report.grad_norm, report.clip_factor, report.stats.amax,
                  static_cast<long long>(report.skipped), static_cast<long long>(report.steps));
    log += (report.applied ? "applied" : "skipped " + report.culprit) + " at " +
           std::to_string(report.scale) + numbers + "\n";
  }
  void update() {
    scaler.update();
    cudaDeviceSynchronize();
    scaler.try_report();  // runs the alarm callback
    if (scaler.enabled()) log += scaler.save() + "\n";
  }

  TensorView grad(size_t i) const { return cuda_ ? device_grads_[i]->view() : grads_[i]->view(); }
  TensorView weight(size_t i) const {
    return cuda_ ? device_weights_[i]->view() : weights_[i]->view();
  }

  // The bytes of weights, gradients, masters, moments and step counts.
  std::vector<std::vector<unsigned char>> bits() const {
    cudaDeviceSynchronize();
    std::vector<std::vector<unsigned char>> all;
    const auto add = [&](const TensorView& view) {
      all.emplace_back(view.bytes());
      cudaMemcpy(all.back().data(), view.data, view.bytes(), cudaMemcpyDefault);
    };
    for (size_t i = 0; i < grads_.size(); ++i) {
      add(weight(i));
      add(grad(i));
    }
    const OptimizerState state = optimizer->state();
    for (const NamedTensor& tensor : state.tensors) add(tensor.tensor);
    const auto* steps = reinterpret_cast<const unsigned char*>(state.steps.data());
    all.emplace_back(steps, steps + 8 * state.steps.size());
    return all;
  }

 private:
  bool cuda_;
  std::vector<std::unique_ptr<HostTensor>> weights_, grads_;
  std::vector<std::unique_ptr<DeviceCopy>> device_weights_, device_grads_;
  std::unique_ptr<HostTensor> loss_;
  std::unique_ptr<DeviceCopy> device_loss_, device_scaled_;

 public:
  std::string log;
  GradScaler scaler;
  std::unique_ptr<Optimizer> optimizer;
};

// Runs the body on the CPU and on the device and compares the logs and all bytes.
template <typename L, typename Body>
void expect_device_matches_cpu(const std::function<std::unique_ptr<L>(bool)>& make,
                               const Body& body) {
  const auto cpu = make(false), cuda = make(true);
  body(*cpu);
  body(*cuda);
  EXPECT_EQ(cuda->log, cpu->log);
  EXPECT_TRUE(cuda->bits() == cpu->bits());
}

using AdamWLoop = Loop<>;
inline std::function<std::unique_ptr<AdamWLoop>(bool)> loop_with(const ScalePolicy& policy,
                                                                 bool enabled = true,
                                                                 DType type = DType::kF16,
                                                                 const Precision& precision = {}) {
  return [=](bool cuda) {
    return std::make_unique<AdamWLoop>(cuda, policy, AdamWOptions{.lr = 0.01}, enabled, type,
                                       precision);
  };
}

}  // namespace headroom

#endif  // HEADROOM_TESTS_CUDA_LOOP_H_
