// torch::optim optimizers whose step is one pass over memory: unscale, clip, update FP32 masters,
// write the 16-bit weight.
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

/// A tensor that a fused optimizer remembers of a parameter.
struct StateTensor {
  size_t parameter = 0;  // counted over all groups
  std::string name;      // "master", "exp_avg", "exp_avg_sq", "momentum_buffer"
  torch::Tensor tensor;  // FP32, of the parameter's size
};

/// All that a fused optimizer remembers, for checkpoints of one's own.
struct FusedState {
  std::vector<int64_t> steps;  // applied steps of each parameter
  std::vector<StateTensor> tensors;
};

namespace internal {
class Bindings;
class FusedBody;
}  // namespace internal

/// The base of FusedSGD, FusedAdam and FusedAdamW. They are torch::optim optimizers: parameter
/// groups with torch's own options, zero_grad, learning-rate schedulers, torch::save and
/// torch::load, in files that torch's SGD, Adam and AdamW read and write too.
///
/// FP32 parameters are updated in place. FP16 and BF16 parameters have FP32 masters inside, unless
/// Precision says otherwise; a weight that was written to or loaded is noticed, and its master
/// follows (not what goes through tensor.data(): see refresh_masters()). Weights have to be dense
/// in memory; gradients may have any strides, or be sparse.
///
/// Under GradScaler::step the step is skipped if a gradient is not finite, and unscaling and
/// clipping cost nothing. step() alone is torch's: no scale, no check. One thread at a time may use
/// an optimizer.
class HEADROOM_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  ~FusedOptimizer() override;

  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// The FP32 values of all parameters, in the order of the groups: masters, or the parameters
  /// themselves where they are FP32. Tensors over the optimizer's own memory: read them, and do not
  /// keep them longer than it.
  std::vector<torch::Tensor> master_params();

  /// Copies the values of 16-bit weights to their masters, after writes that torch does not count:
  /// through tensor.data(), or a kernel of your own. Moments stay.
  void refresh_masters();

  /// How often parameter `index`, counted over all groups, was updated. A skipped step does not
  /// count.
  int64_t steps(size_t index) const;

  /// Masters, moments and step counts. Tensors over the optimizer's own memory, as in
  /// master_params().
  FusedState fused_state();

  /// Takes over a state that came from fused_state() of an optimizer with the same parameters;
  /// masters are written to the 16-bit weights as well. Throws Error(kBadState), changing nothing,
  /// unless tensors and sizes are the same, counts are not negative and every value is finite.
  void load_fused_state(const FusedState& state);

 protected:
  FusedOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                 std::shared_ptr<internal::FusedBody> body);

 private:
  friend class internal::Bindings;
  internal::FusedBody& bound(bool with_gradients);

  std::shared_ptr<internal::FusedBody> body_;
};

/// torch::optim::SGD, fused. Whether momentum is 0 cannot change.
class HEADROOM_API FusedSGD : public FusedOptimizer {
 public:
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
  explicit FusedAdamW(std::vector<torch::optim::OptimizerParamGroup> groups,
                      torch::optim::AdamWOptions defaults = {}, const Precision& precision = {});
  explicit FusedAdamW(std::vector<torch::Tensor> params, torch::optim::AdamWOptions defaults = {},
                      const Precision& precision = {})
      : FusedAdamW({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
                   precision) {}
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_OPTIM_H_
