// apply: optimizers that take scaled 16-bit gradients and update FP32 masters, in one pass over
// memory: unscale, clip, update, write the 16-bit weight, clear the gradient.
#ifndef HEADROOM_OPTIMIZER_H_
#define HEADROOM_OPTIMIZER_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

namespace internal {
class CudaApply;
struct ApplyJob;
struct OptimizerRecord;
class Scaler;
struct ScalerAccess;
}  // namespace internal

/// On a CUDA device: what GradScaler::step has decided.
struct DeviceVerdict {
  bool apply;        // false: skip the step, change nothing
  float multiplier;  // gradient x multiplier = the unscaled, clipped gradient
};

/// What GradScaler works on: a list of parameters and a way to update them. Derive from it to put
/// an optimizer of your own under a GradScaler; SGD, Adam and AdamW below are the fused ones.
///
/// One thread at a time may use an optimizer. Its parameters' memory must outlive it.
class HEADROOM_API Optimizer {
 public:
  virtual ~Optimizer();

  const std::vector<Parameter>& parameters() const;

  /// Updates the weights with gradient x multiplier. Called by GradScaler::step after the verdict,
  /// and never for a step that is skipped. With `clear_grads` the gradients are zero afterwards.
  virtual void apply(float multiplier, bool clear_grads) = 0;

  /// Called instead of apply() by a scaler on a CUDA device. Override it for an optimizer of your
  /// own that runs there: enqueue kernels on `stream` (a cudaStream_t) that read `*verdict` on the
  /// device, update the weights if it says so, and return true. The verdict is not known on the
  /// host yet and nothing may wait for it. Gradients of a skipped step are cleared by the scaler.
  /// The default returns false: the scaler then waits for the verdict and calls apply() or
  /// skipped().
  virtual bool apply_on_device(const DeviceVerdict* verdict, bool clear_grads, void* stream);

  /// Called by GradScaler::step instead of apply() when the step is skipped, with what
  /// StepReport::culprit will say.
  virtual void skipped(const std::string& culprit);

  /// Called by a GradScaler before it uses parameters(), and after it has written to gradients (by
  /// unscale_, or because they were cleared). For wrappers of frameworks that move their tensors:
  /// refresh() calls rebind() or set_grad() where something has moved.
  virtual void refresh();
  virtual void gradients_changed();

  /// Writes zeros to all gradients.
  void zero_grad();

  /// Gives parameter `index` another gradient, or none (a default-made view). Throws like the
  /// constructor, changing nothing, if it does not fit.
  virtual void set_grad(size_t index, const TensorView& grad);

  /// Takes another list of parameters at once, for frameworks that allocate gradients anew each
  /// step. Throws like the constructor, changing nothing.
  virtual void rebind(std::vector<Parameter> parameters);

  /// Whether gradients x multiplier would not fit where apply() puts them. Asked where a scale
  /// below 1 makes the multiplier larger than 1; true skips the step.
  virtual bool overflows(float multiplier) const;

 protected:
  /// Throws if a weight or gradient cannot be used, if their sizes differ, or if memory is shared
  /// between any two of them.
  explicit Optimizer(std::vector<Parameter> parameters);
  Optimizer(Optimizer&& other) noexcept;
  Optimizer& operator=(Optimizer&& other) noexcept;

  /// Adds parameters; throws as the constructor does, having added nothing.
  void append(std::vector<Parameter> parameters);

 private:
  friend class internal::Scaler;

  /// What steps this optimizer on a CUDA device without asking the host, or null if it cannot.
  virtual internal::CudaApply* cuda_side(int device, internal::ApplyJob* job);

  std::shared_ptr<internal::OptimizerRecord> record_;  // null once moved from
};

/// How 16-bit weights are kept.
struct Precision {
  /// FP32 copies of 16-bit weights, which the updates go to. Without them updates smaller than half
  /// a unit in the weight's last place are lost.
  bool master_weights = true;

  /// Round bf16 weights up or down at random, with the right mean, instead of to nearest. The
  /// choice depends on the seed, the step, the parameter and the element, not on threads.
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

/// A tensor of an optimizer's state, by name: "embed.weight/master", "embed.weight/exp_avg".
struct NamedTensor {
  std::string name;
  TensorView tensor;
  size_t parameter = 0;  // the index of "embed.weight"
};

/// All that an optimizer remembers. `tensors` are views of the optimizer's own memory, valid as
/// long as it lives; copy what they show to keep it.
struct OptimizerState {
  std::vector<int64_t> steps;  // applied steps of each parameter
  std::vector<NamedTensor> tensors;
};

namespace internal {
struct FusedState;
struct RuleSettings;
}  // namespace internal

/// The base of SGD, Adam and AdamW: masters, state and step counts. The weights' values are copied
/// to the masters when a parameter is added.
///
/// On CUDA, construction, add_group(), load_state(), refresh_masters() and a rebind() that moves
/// weights work on the current stream (StreamScope) and wait for it, so that a step on any other
/// stream finds masters and state complete. They do not wait for steps on other streams: call them
/// on the stream of the steps, or after those are done. apply(), zero_grad(), follow_weight() and
/// set_lr() enqueue on the current stream and return.
class HEADROOM_API FusedOptimizer : public Optimizer {
 public:
  ~FusedOptimizer() override;

  void apply(float multiplier, bool clear_grads) override;
  void set_grad(size_t index, const TensorView& grad) override;

  /// The same parameters in the same order, with weights of the same counts and types. A weight at
  /// another address may have a new value: its master follows it.
  void rebind(std::vector<Parameter> parameters) override;

  /// Steps applied to parameter `index` so far. A skipped step does not count.
  int64_t steps(size_t index) const;

  /// Sets the steps of all parameters, for a trainer that resumes with masters and moments of its
  /// own (Parameter::master). Adam's bias correction depends on it.
  void set_steps(int64_t steps);

  /// The FP32 values of parameter `index`: its master, or the weight itself if that is FP32. Null
  /// for a 16-bit weight without master.
  const float* master(size_t index) const;

  /// Copies the weights' current values to the masters, after weights were loaded or changed by
  /// hand. Moments and step counts stay.
  void refresh_masters();
  void refresh_master(size_t index);

  /// The same for one that somebody may have written to: only where it is not what its master
  /// rounds to, so that masters of weights that were swapped out and back stay exact.
  void follow_weight(size_t index);

  OptimizerState state() const;

  /// Takes over a state that came from state() of an optimizer with the same parameters. Masters
  /// are written to the 16-bit weights as well. Throws Error(kBadState), changing nothing, unless
  /// names, sizes and types are the same, counts are not negative and every value is finite.
  void load_state(const OptimizerState& state);

 protected:
  explicit FusedOptimizer(const Precision& precision);
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  /// Adds parameters that are updated by `settings`; returns the index of the new group.
  size_t append_group(std::vector<Parameter> parameters, const internal::RuleSettings& settings);
  void change_group(size_t group, const internal::RuleSettings& settings);

 private:
  internal::CudaApply* cuda_side(int device, internal::ApplyJob* job) override;
  internal::FusedState& own() const;

  std::unique_ptr<internal::FusedState> state_;
};

/// Groups of parameters, each with options of its own.
template <typename Options>
class HEADROOM_API GroupedOptimizer : public FusedOptimizer {
 public:
  /// Adds a group and returns its index; the constructor's is 0. Throws, having added nothing, if
  /// an option or a parameter is impossible.
  size_t add_group(std::vector<Parameter> parameters, const Options& options);

  const Options& options(size_t group = 0) const;
  void set_options(const Options& options, size_t group = 0);

  /// Sets the learning rate of every group.
  void set_lr(double lr);

 protected:
  GroupedOptimizer(std::vector<Parameter> parameters, const Options& options,
                   const Precision& precision);

 private:
  std::vector<Options> groups_;
};

struct HEADROOM_API SGDOptions {
  double lr = 1e-3;
  double momentum = 0.0;  // whether it is 0 cannot change once a group is made
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
};

/// Stochastic gradient descent by torch.optim.SGD's formulas. The momentum buffer comes into being
/// with the first step that is applied.
class HEADROOM_API SGD : public GroupedOptimizer<SGDOptions> {
 public:
  explicit SGD(std::vector<Parameter> parameters, const SGDOptions& options = {},
               const Precision& precision = {})
      : GroupedOptimizer(std::move(parameters), options, precision) {}
};

struct HEADROOM_API AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

/// Adam with L2 regularisation, by torch.optim.Adam's formulas.
class HEADROOM_API Adam : public GroupedOptimizer<AdamOptions> {
 public:
  explicit Adam(std::vector<Parameter> parameters, const AdamOptions& options = {},
                const Precision& precision = {})
      : GroupedOptimizer(std::move(parameters), options, precision) {}
};

struct HEADROOM_API AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

/// Adam with decoupled weight decay, by torch.optim.AdamW's formulas.
class HEADROOM_API AdamW : public GroupedOptimizer<AdamWOptions> {
 public:
  explicit AdamW(std::vector<Parameter> parameters, const AdamWOptions& options = {},
                 const Precision& precision = {})
      : GroupedOptimizer(std::move(parameters), options, precision) {}
};

extern template class GroupedOptimizer<SGDOptions>;
extern template class GroupedOptimizer<AdamOptions>;
extern template class GroupedOptimizer<AdamWOptions>;

}  // namespace headroom

#endif  // HEADROOM_OPTIMIZER_H_
