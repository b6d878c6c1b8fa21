// torch::optim optimizers that unscale, clip, update FP32 masters and write 16-bit weights in one
// pass over memory.
#ifndef HEADROOM_LIBTORCH_OPTIM_H_
#define HEADROOM_LIBTORCH_OPTIM_H_

#include <headroom/export.h>
#include <headroom/optimizer.h>
#include <torch/optim.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom::libtorch {

/// A state tensor of one parameter.
struct StateTensor {
  size_t parameter = 0;  // index over all groups
  std::string name;      // "master", "exp_avg", "exp_avg_sq", "momentum"
  torch::Tensor tensor;  // FP32, of the parameter's size
};

/// The complete state of a fused optimizer, for custom checkpoints.
struct FusedState {
  std::vector<int64_t> steps;  // applied steps of each parameter
  std::vector<StateTensor> tensors;
  StateFormat format = StateFormat::kFull;  // as OptimizerState::format
};

namespace internal {
class Bindings;
class BoundBody;
class FusedBody;
}  // namespace internal

/// The base of FusedSGD, FusedAdam and FusedAdamW. They are torch::optim optimizers: parameter
/// groups with torch's options, zero_grad, learning-rate schedulers, torch::save and torch::load,
/// in files that are interchangeable with those of torch's SGD, Adam and AdamW.
///
/// FP32 parameters are updated in place. FP16 and BF16 parameters have FP32 masters inside, unless
/// Precision disables them. If a weight is written to or loaded, its master is updated from it, as
/// far as torch's version counter shows it, or the samples that headroom::FusedOptimizer::apply()
/// looks at. Weights must be dense in memory; gradients may be sparse or have any strides.
///
/// Masters and moments are in memory from torch's allocator, which the first step allocates. Until
/// then the parameters may change their type and device.
///
/// GradScaler::step skips the step if a gradient is not finite, and unscales and clips in the pass
/// that updates. step() by itself neither unscales nor checks, like torch's. One thread at a time
/// may use an optimizer. CUDA work goes to LibTorch's current stream.
class HEADROOM_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  ~FusedOptimizer() override;

  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// The FP32 values of all parameters, in the order of the groups: masters, or the parameters
  /// themselves where they have none. The optimizer owns the memory: do not write to the tensors,
  /// and do not keep them longer than it.
  std::vector<torch::Tensor> master_params();

  /// Copies the values of 16-bit weights to their masters, after writes of few elements that
  /// torch's version counter does not show: through tensor.data() or custom kernels. Moments are
  /// unchanged.
  void refresh_masters();

  /// The number of applied steps of parameter `index`, counted over all groups. Skipped steps are
  /// not counted.
  int64_t steps(size_t index) const;

  /// Masters, moments and step counts. The optimizer owns the memory, as in master_params().
  FusedState fused_state();

  /// Copies the fused_state() of an optimizer with the same parameters, and writes masters to the
  /// 16-bit weights. Throws Error(kBadState), changing nothing, unless tensors and sizes are the
  /// same, counts are not negative and all values are finite.
  void load_fused_state(const FusedState& state);

 protected:
  /// For the classes below.
  FusedOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                 std::shared_ptr<internal::FusedBody> body);

 private:
  friend class internal::Bindings;
  internal::BoundBody bind(bool with_gradients);

  std::shared_ptr<internal::FusedBody> body_;
};

/// torch::optim::SGD, fused. Whether momentum is 0 cannot change after construction.
class HEADROOM_API FusedSGD : public FusedOptimizer {
 public:
  /// From groups with options of their own, or from one list of parameters.
  FusedSGD(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::SGDOptions defaults,
           const Precision& precision = {});
  FusedSGD(std::vector<torch::Tensor> params, torch::optim::SGDOptions defaults,
           const Precision& precision = {})
      : FusedSGD({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
                 precision) {}
};

/// torch::optim::Adam, fused; without amsgrad.
class HEADROOM_API FusedAdam : public FusedOptimizer {
 public:
  /// From groups with options of their own, or from one list of parameters.
  explicit FusedAdam(std::vector<torch::optim::OptimizerParamGroup> groups,
                     torch::optim::AdamOptions defaults = {}, const Precision& precision = {});
  explicit FusedAdam(std::vector<torch::Tensor> params, torch::optim::AdamOptions defaults = {},
                     const Precision& precision = {})
      : FusedAdam({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
                  precision) {}
};

/// torch::optim::AdamW, fused; without amsgrad.
class HEADROOM_API FusedAdamW : public FusedOptimizer {
 public:
  /// From groups with options of their own, or from one list of parameters.
  explicit FusedAdamW(std::vector<torch::optim::OptimizerParamGroup> groups,
                      torch::optim::AdamWOptions defaults = {}, const Precision& precision = {});
  explicit FusedAdamW(std::vector<torch::Tensor> params, torch::optim::AdamWOptions defaults = {},
                      const Precision& precision = {})
      : FusedAdamW({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
                   precision) {}
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_OPTIM_H_
