// apply: optimizers that read scaled 16-bit gradients and update FP32 masters in one pass over
// memory: unscale, clip, update, write the 16-bit weight, clear the gradient.
#ifndef HEADROOM_OPTIMIZER_H_
#define HEADROOM_OPTIMIZER_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <functional>
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

/// The decision of GradScaler::step, on a CUDA device.
struct DeviceVerdict {
  bool apply;        // false: skip the step, change nothing
  float multiplier;  // gradient x multiplier = the unscaled, clipped gradient
};

/// A list of parameters and a way to update them, as GradScaler needs it. Derive from it to use
/// your own optimizer with a GradScaler; SGD, Adam, AdamW and Lion below are the fused ones.
///
/// Not thread-safe. The memory of the parameters must outlive the optimizer.
class HEADROOM_API Optimizer {
 public:
  virtual ~Optimizer();

  /// The parameters in the order of their indices.
  const std::vector<Parameter>& parameters() const;

  /// Updates the weights with gradient x multiplier. Called by GradScaler::step after the verdict,
  /// and never for a step that is skipped. With `clear_grads` the gradients are zero afterwards.
  virtual void apply(float multiplier, bool clear_grads) = 0;

  /// Called instead of apply() by a scaler on a CUDA device. Override it if your optimizer runs
  /// there: enqueue kernels on `stream` (a cudaStream_t) that read `*verdict` on the device and
  /// update the weights if `apply` is true; then return true. Do not wait: the verdict is not known
  /// on the host yet. The scaler clears the gradients of a skipped step. The default returns false:
  /// the scaler then waits for the verdict and calls apply() or skipped().
  virtual bool apply_on_device(const DeviceVerdict* /*verdict*/, bool /*clear_grads*/,
                               void* /*stream*/) {
    return false;
  }

  /// Called by GradScaler::step instead of apply() when the step is skipped, with
  /// StepReport::culprit.
  virtual void skipped(const std::string& /*culprit*/) {}

  /// For wrappers of frameworks that move their tensors. A GradScaler calls refresh() before it
  /// uses parameters(); it should call rebind() or set_grad() if something has moved. It calls
  /// gradients_changed() after it has written to gradients (unscaled, rescaled or cleared them).
  virtual void refresh() {}
  virtual void gradients_changed() {}

  /// Whether refresh() notices weights that others have written. Then another optimizer under the
  /// same scaler may update the same weights, in rounds of its own; otherwise a GradScaler refuses
  /// it.
  virtual bool follows_weights() const { return false; }

  /// Writes zeros to all gradients.
  void zero_grad();

  /// Replaces the gradient of parameter `index`; an empty view means none. Throws like the
  /// constructor, changing nothing, if it does not fit.
  virtual void set_grad(size_t index, const TensorView& grad);

  /// Replaces the whole list of parameters, for frameworks that allocate new gradients in each
  /// step. Throws like the constructor, changing nothing.
  virtual void rebind(std::vector<Parameter> parameters);

  /// Whether gradient x multiplier overflows the memory in which apply() stores it. Called if a
  /// scale below 1 makes the multiplier larger than 1; true skips the step.
  virtual bool overflows(float /*multiplier*/) const { return false; }

 protected:
  /// Throws Error if an array cannot be used, if the arrays of a parameter have different sizes or
  /// devices, or if any two share memory.
  explicit Optimizer(std::vector<Parameter> parameters);
  Optimizer(Optimizer&& other) noexcept;
  Optimizer& operator=(Optimizer&& other) noexcept;

  /// Adds parameters; throws as the constructor does, having added nothing.
  void append(std::vector<Parameter> parameters);

  /// Leaves all parameters without a gradient: the memory of the gradients is gone.
  void drop_gradients();

 private:
  friend class internal::Scaler;

  /// The implementation that steps this optimizer on a CUDA device without the host; null if there
  /// is none.
  virtual internal::CudaApply* cuda_side(int /*device*/, internal::ApplyJob* /*job*/) {
    return nullptr;
  }

  std::shared_ptr<internal::OptimizerRecord> record_;  // null once moved from
};

/// How masters and moments are stored. docs/state.md has what each format costs and keeps.
enum class StateFormat : uint8_t {
  kFull,  // FP32 masters and moments: with a 16-bit weight and gradient 16 bytes a parameter
  kHalf,  // the 16 bits of a master below the weight, moments in bf16: 10 bytes
  kByte,  // 8 bits below the weight, moments in 8 bits with shared exponents: 7.1 bytes
};

/// "full", "half" or "byte".
HEADROOM_API const char* to_string(StateFormat format);

/// The format with this name. Throws Error(kInvalidArgument) if there is none.
HEADROOM_API StateFormat state_format(const std::string& name);

/// How 16-bit weights and the state of their optimizer are stored and rounded.
struct Precision {
  /// Keep FP32 copies of 16-bit weights, to which updates are applied. Without them, updates
  /// smaller than half a unit in the last place of the weight are lost.
  bool master_weights = true;

  /// Round bf16 weights up or down at random, with the right mean, instead of to nearest. The
  /// result depends on the seed, the step, the parameter and the element, not on threads.
  bool stochastic_rounding = false;
  uint64_t seed = 0;

  /// With kHalf and kByte, the weights are the masters rounded to nearest, so that masters cannot
  /// be left out and weights not be rounded at random. FP32 weights have no masters; their moments
  /// are stored alike.
  StateFormat state = StateFormat::kFull;
};

/// A tensor of an optimizer's state, by name: "embed.weight/master", "embed.weight/exp_avg".
struct NamedTensor {
  std::string name;
  TensorView tensor;
  size_t parameter = 0;  // the index of "embed.weight"
};

/// The state of an optimizer, in FP32. With StateFormat::kFull, `tensors` are views of the
/// optimizer's memory, valid as long as it exists; copy the data to keep it. With the other formats
/// they are exact copies.
struct OptimizerState {
  std::vector<int64_t> steps;  // applied steps of each parameter
  std::vector<NamedTensor> tensors;
  std::shared_ptr<void> copies;  // the memory of the tensors; null if it is the optimizer's
  // Of the optimizer that it was saved from, so that masters halfway between two weights get the
  // same weight again; kFull also where it is not known.
  StateFormat format = StateFormat::kFull;
};

namespace internal {
struct FusedState;
struct RuleSettings;
}  // namespace internal

/// Returns `bytes` of memory on a device, aligned to 64 bytes and with any contents, and frees it
/// when the last copy of the pointer is gone. On CUDA the memory has to be usable on the current
/// stream (StreamScope). May throw anything; the optimizer is unchanged then.
using StateAllocator = std::function<std::shared_ptr<void>(size_t bytes, const Device& device)>;

/// The base of SGD, Adam, AdamW and Lion: masters, state and step counts. The weights' values are
/// copied to the masters when a parameter is added, or later with set_allocator().
///
/// On CUDA, construction, add_group(), load_state(), refresh_masters() and a rebind() that moves
/// weights use the current stream (StreamScope) and wait for it, so that a later step on any stream
/// sees complete masters and state. They do not wait for steps on other streams: call them on the
/// stream of the steps, or after those are done. apply(), zero_grad(), follow_weight() and set_lr()
/// enqueue on the current stream and return.
class HEADROOM_API FusedOptimizer : public Optimizer {
 public:
  ~FusedOptimizer() override;

  /// Before the update, masters follow 16-bit weights that the user has written since the last
  /// step. These are noticed by samples of each weight: any change in a tensor of up to 2,048
  /// elements, or of 32,768 consecutive elements (on CUDA: 4,096), is kept, with all other changes
  /// of that tensor. Call refresh_masters() after smaller changes, which may be overwritten.
  void apply(float multiplier, bool clear_grads) override;
  void set_grad(size_t index, const TensorView& grad) override;

  /// Takes the same parameters in the same order, with weights of the same counts, types and
  /// devices; before allocate() types and devices may change. The master of a weight at another
  /// address follows it, see follow_weight().
  void rebind(std::vector<Parameter> parameters) override;

  /// For frameworks with an allocator of their own: masters and moments of groups that are added
  /// from now on use its memory, one block per device, and are made by allocate(). A null allocator
  /// stands for the library's own memory, which is allocated when the group is added.
  void set_allocator(StateAllocator allocator);

  /// Allocates masters, as copies of the weights, and moments that do not exist yet. The first step
  /// and load_state() do this by themselves. Throws what the allocator throws, having changed
  /// nothing, and Error(kWrongOrder) while a CUDA graph is captured. Waits for the current stream
  /// if it allocates on a CUDA device.
  void allocate();

  /// How many parameters, from the first on, have masters and moments in memory.
  size_t allocated() const;

  /// Steps applied to parameter `index` so far; skipped ones do not count. Waits for a CUDA device.
  int64_t steps(size_t index) const;

  /// Sets the step count of all parameters, for a trainer that resumes with its own masters and
  /// moments (Parameter::master). Adam's bias correction depends on it.
  void set_steps(int64_t steps);

  /// The FP32 values of parameter `index`: its master, or the weight itself if it is FP32; null for
  /// a 16-bit weight whose master is not stored in FP32 (see Precision), or before allocate(). A
  /// device pointer if the weight is on a CUDA device.
  const float* master(size_t index) const;

  /// Copies the current values of the weights to the masters, after weights were loaded or changed
  /// by the user (see apply()). Moments and step counts do not change.
  void refresh_masters();
  void refresh_master(size_t index);

  /// Copies only those elements of a weight that are not a rounding of their master, so that the
  /// masters of weights that were swapped out and back stay exact.
  void follow_weight(size_t index);

  /// Has no tensors of parameters whose memory is not allocated yet, see set_allocator().
  OptimizerState state() const;

  /// Loads a state from state() of an optimizer with the same parameters and any StateFormat, and
  /// writes the 16-bit weights from the masters. Values that this format cannot hold are rounded to
  /// nearest; a state of the same format is loaded exactly. Throws Error(kBadState), changing
  /// nothing, unless names, sizes and types are the same, counts are not negative and every value
  /// is finite.
  void load_state(const OptimizerState& state);

 protected:
  /// For derived classes.
  explicit FusedOptimizer(const Precision& precision);
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  /// Adds a group of parameters with these settings and returns its index.
  size_t append_group(std::vector<Parameter> parameters, const internal::RuleSettings& settings);
  void change_group(size_t group, const internal::RuleSettings& settings);

 private:
  internal::CudaApply* cuda_side(int device, internal::ApplyJob* job) override;
  internal::FusedState& own() const;

  std::unique_ptr<internal::FusedState> state_;
};

/// A fused optimizer with groups of parameters, each with its own options.
template <typename Options>
class HEADROOM_API GroupedOptimizer : public FusedOptimizer {
 public:
  /// Adds a group and returns its index; the constructor's group is 0. Throws, having added
  /// nothing, if an option or a parameter is invalid.
  size_t add_group(std::vector<Parameter> parameters, const Options& options);

  /// The options of a group. set_options() takes effect in the next step.
  const Options& options(size_t group = 0) const;
  void set_options(const Options& options, size_t group = 0);

  /// Sets the learning rate of every group.
  void set_lr(double lr);

 protected:
  /// For derived classes.
  GroupedOptimizer(std::vector<Parameter> parameters, const Options& options,
                   const Precision& precision);

 private:
  std::vector<Options> groups_;
};

/// Options of torch.optim.SGD, with its meanings.
struct HEADROOM_API SGDOptions {
  double lr = 1e-3;
  double momentum = 0.0;  // cannot be changed from or to 0 in an existing group
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
};

/// Stochastic gradient descent with torch.optim.SGD's formulas. The first applied step initialises
/// the momentum buffer with the gradient.
class HEADROOM_API SGD : public GroupedOptimizer<SGDOptions> {
 public:
  /// Makes masters and moments for these parameters, in one group.
  explicit SGD(std::vector<Parameter> parameters, const SGDOptions& options = {},
               const Precision& precision = {})
      : GroupedOptimizer(std::move(parameters), options, precision) {}
};

/// Options of torch.optim.Adam, with its meanings.
struct HEADROOM_API AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

/// Adam with L2 regularisation, with torch.optim.Adam's formulas.
class HEADROOM_API Adam : public GroupedOptimizer<AdamOptions> {
 public:
  /// Makes masters and moments for these parameters, in one group.
  explicit Adam(std::vector<Parameter> parameters, const AdamOptions& options = {},
                const Precision& precision = {})
      : GroupedOptimizer(std::move(parameters), options, precision) {}
};

/// Options of torch.optim.AdamW, with its meanings.
struct HEADROOM_API AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

/// Adam with decoupled weight decay, with torch.optim.AdamW's formulas.
class HEADROOM_API AdamW : public GroupedOptimizer<AdamWOptions> {
 public:
  /// Makes masters and moments for these parameters, in one group.
  explicit AdamW(std::vector<Parameter> parameters, const AdamWOptions& options = {},
                 const Precision& precision = {})
      : GroupedOptimizer(std::move(parameters), options, precision) {}
};

/// The settings of Lion, with the names and defaults of its paper.
struct HEADROOM_API LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;   // weight of the momentum in the sign
  double beta2 = 0.99;  // decay of the momentum
  double weight_decay = 0.0;
};

/// Lion (arXiv 2302.06675): the sign of an interpolation of momentum and gradient, with decoupled
/// weight decay. One moment instead of Adam's two.
class HEADROOM_API Lion : public GroupedOptimizer<LionOptions> {
 public:
  /// Makes masters and momenta for these parameters, in one group.
  explicit Lion(std::vector<Parameter> parameters, const LionOptions& options = {},
                const Precision& precision = {})
      : GroupedOptimizer(std::move(parameters), options, precision) {}
};

extern template class GroupedOptimizer<SGDOptions>;
extern template class GroupedOptimizer<AdamOptions>;
extern template class GroupedOptimizer<AdamWOptions>;
extern template class GroupedOptimizer<LionOptions>;

}  // namespace headroom

#endif  // HEADROOM_OPTIMIZER_H_
