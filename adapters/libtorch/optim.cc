// FusedSGD, FusedAdam and FusedAdamW: converts torch's options and checkpoint files for the core's
// three optimizers.
#include <headroom/error.h>
#include <headroom/libtorch/optim.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <string>
#include <utility>

#include "fused.h"

namespace headroom::libtorch {
namespace internal {
namespace {

using torch::Tensor;

// A rule: the core's optimizer, torch's types for the same one, and conversions between them.
// `tensors` and `fill` convert torch's per-parameter state; `steps` is its step count.
struct SgdRule {
  using Core = headroom::SGD;
  using CoreOptions = headroom::SGDOptions;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  static CoreOptions core_options(const Options& options) {
    CoreOptions core;
    core.lr = options.lr();
    core.momentum = options.momentum();
    core.dampening = options.dampening();
    core.weight_decay = options.weight_decay();
    core.nesterov = options.nesterov();
    return core;
  }
  static std::vector<Tensor> tensors(const State& state) { return {state.momentum_buffer()}; }
  // Torch does not count SGD's steps; for the core only 0 differs from the rest.
  static int64_t steps(const State& state) { return state.momentum_buffer().defined() ? 1 : 0; }
  static void fill(State* state, int64_t, const std::vector<Tensor>& tensors) {
    if (!tensors.empty()) state->momentum_buffer(tensors[0]);
  }
};

template <typename CoreType, typename CoreOptionsType, typename OptionsType, typename StateType>
struct AdamRule {
  using Core = CoreType;
  using CoreOptions = CoreOptionsType;
  using Options = OptionsType;
  using State = StateType;

  static CoreOptions core_options(const Options& options) {
    if (options.amsgrad()) {
      unsupported("The fused Adam and AdamW have no amsgrad; use torch's optimizers for it.");
    }
    CoreOptions core;
    core.lr = options.lr();
    core.beta1 = std::get<0>(options.betas());
    core.beta2 = std::get<1>(options.betas());
    core.eps = options.eps();
    core.weight_decay = options.weight_decay();
    return core;
  }
  static std::vector<Tensor> tensors(const State& state) {
    return {state.exp_avg(), state.exp_avg_sq()};
  }
  static int64_t steps(const State& state) { return state.step(); }
  static void fill(State* state, int64_t steps, const std::vector<Tensor>& tensors) {
    state->step(steps);
    state->exp_avg(tensors[0]);
    state->exp_avg_sq(tensors[1]);
  }
};

using AdamOnly = AdamRule<headroom::Adam, headroom::AdamOptions, torch::optim::AdamOptions,
                          torch::optim::AdamParamState>;
using AdamWOnly = AdamRule<headroom::AdamW, headroom::AdamWOptions, torch::optim::AdamWOptions,
                           torch::optim::AdamWParamState>;

// A torch optimizer without a step. Torch's serialization functions save from it and load into it.
class Snapshot : public torch::optim::Optimizer {
 public:
  Snapshot(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           std::unique_ptr<torch::optim::OptimizerOptions> defaults)
      : Optimizer(groups, std::move(defaults)) {}
  Tensor step(LossClosure) override { return {}; }

  // The state of a parameter. LibTorch before 2.0 uses its address as text for a key.
  auto& of(const Tensor& parameter) {
#if TORCH_VERSION_MAJOR >= 2
    return state_[parameter.unsafeGetTensorImpl()];
#else
    return state_[c10::guts::to_string(parameter.unsafeGetTensorImpl())];
#endif
  }
};

constexpr const char* kOurPart = "headroom";  // the part of the archive that torch ignores

template <typename Rule>
class FusedOf : public FusedBody {
 public:
  using Options = typename Rule::Options;
  using State = typename Rule::State;

  explicit FusedOf(const Precision& precision) : core_(this, precision) {}

  headroom::FusedOptimizer& fused() override { return core_; }

  void save(const torch::optim::Optimizer& optimizer,
            torch::serialize::OutputArchive& archive) override;
  void load(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) override;

 protected:
  // Group g of torch is group g + 1 of the core: the core is created with an empty group 0.
  void sync_groups(torch::optim::Optimizer& optimizer) override {
    for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
      const auto& group = optimizer.param_groups()[g];
      const auto options = Rule::core_options(static_cast<const Options&>(group.options()));
      if (g < groups_) {
        core_.set_options(options, g + 1);
        continue;
      }
      core_.add_group(new_parameters(group.params()), options);
      tensors_.insert(tensors_.end(), group.params().begin(), group.params().end());
      ++groups_;
    }
  }

 private:
  // The core's optimizer. It updates its views of torch's tensors whenever the scaler is about to
  // use it.
  class Core : public Rule::Core {
   public:
    Core(FusedBody* body, const Precision& precision)
        : Rule::Core({}, typename Rule::CoreOptions{}, precision), body_(body) {
      this->set_allocator(torch_memory);
    }
    void refresh() override { body_->refresh(true); }
    bool follows_weights() const override { return true; }
    void gradients_changed() override { body_->gradients_changed(); }

   private:
    FusedBody* body_;
  };

  Core core_;
  size_t groups_ = 0;
};

constexpr const char* kMaster = "master";

std::string master_key(size_t parameter) { return "master/" + std::to_string(parameter); }

template <typename Rule>
void FusedOf<Rule>::save(const torch::optim::Optimizer& optimizer,
                         torch::serialize::OutputArchive& archive) {
  const FusedState state = this->state();
  torch::serialize::OutputArchive ours(archive.compilation_unit());
  ours.write("steps", torch::tensor(state.steps));
  ours.write("format", torch::tensor(static_cast<int64_t>(state.format)));
  std::vector<std::vector<Tensor>> buffers(tensors_.size());
  for (const StateTensor& item : state.tensors) {
    if (item.name == kMaster) {
      ours.write(master_key(item.parameter), item.tensor.clone());
    } else {
      buffers[item.parameter].push_back(item.tensor.clone());
    }
  }
  Snapshot snapshot(optimizer.param_groups(), optimizer.defaults().clone());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (state.steps[i] == 0) continue;
    auto saved = std::make_unique<State>();
    Rule::fill(saved.get(), state.steps[i], buffers[i]);
    snapshot.of(tensors_[i]) = std::move(saved);
  }
  torch::optim::serialize<State, Options>(archive, snapshot);
  archive.write(kOurPart, ours);
}

// If this throws, weights, state and torch's options are unchanged. The core may then have the new
// options, until the next bind() sets torch's again.
template <typename Rule>
void FusedOf<Rule>::load(torch::optim::Optimizer& optimizer,
                         torch::serialize::InputArchive& archive) {
  Snapshot snapshot(optimizer.param_groups(), optimizer.defaults().clone());
  torch::optim::serialize<State, Options>(archive, snapshot);
  torch::serialize::InputArchive ours;
  const bool has_ours = archive.try_read(kOurPart, ours);  // else torch's optimizer wrote it

  core_.allocate();
  FusedState state = this->state();
  Tensor steps = torch::empty({0}, torch::kLong), format;
  if (has_ours) ours.read("steps", steps);
  state.format = StateFormat::kFull;
  if (has_ours && ours.try_read("format", format)) {
    const auto read = format.item<int64_t>();
    if (read >= 0 && read <= static_cast<int64_t>(StateFormat::kByte)) {
      state.format = static_cast<StateFormat>(read);
    }
  }
  std::vector<std::vector<Tensor>> buffers(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto* const saved = static_cast<const State*>(snapshot.of(tensors_[i]).get());
    if (saved != nullptr) buffers[i] = Rule::tensors(*saved);
    state.steps[i] = saved == nullptr ? 0 : Rule::steps(*saved);
    const auto place = static_cast<int64_t>(i);
    if (place < steps.numel()) state.steps[i] = steps[place].template item<int64_t>();
  }
  // The state's tensors are in the core's order, and Rule::tensors() lists moments in that order.
  std::vector<size_t> next_buffer(tensors_.size(), 0);
  for (StateTensor& item : state.tensors) {
    const Tensor& parameter = tensors_[item.parameter];
    Tensor value;
    if (item.name == kMaster) {
      if (has_ours) ours.try_read(master_key(item.parameter), value);
      if (!value.defined()) value = parameter.detach();  // torch's file has no masters
    } else if (!buffers[item.parameter].empty()) {
      value = buffers[item.parameter].at(next_buffer[item.parameter]++);
    }
    item.tensor = value.defined() ? value : torch::zeros_like(item.tensor);
  }
  // LibTorch before 2.0 ignores the options of groups when it loads, so they are read here.
  torch::serialize::InputArchive groups;
  archive.read("param_groups", groups);
  std::vector<std::pair<std::vector<std::string>, std::unique_ptr<torch::optim::OptimizerOptions>>>
      options;
  torch::optim::detail::serialize<Options>(groups, options);

  for (size_t g = 0; g < options.size(); ++g) {  // throws if momentum changes from or to 0
    core_.set_options(Rule::core_options(static_cast<const Options&>(*options[g].second)), g + 1);
  }
  // load_state() writes masters to the weights. Restore the weights, which belong to the model's
  // own file; masters that do not round to them are updated by the next refresh().
  std::vector<std::pair<Tensor, Tensor>> weights;
  for (const Tensor& parameter : tensors_) {
    if (parameter.scalar_type() == torch::kFloat) continue;
    weights.emplace_back(parameter, parameter.detach().clone());
  }
  load_state(state);
  {
    const torch::NoGradGuard no_grad;
    for (auto& [parameter, values] : weights) parameter.copy_(values);
  }
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    optimizer.param_groups()[g].set_options(std::move(options[g].second));
  }
}

}  // namespace
}  // namespace internal

FusedSGD::FusedSGD(std::vector<torch::optim::OptimizerParamGroup> groups,
                   torch::optim::SGDOptions defaults, const Precision& precision)
    : FusedOptimizer(std::move(groups), std::make_unique<torch::optim::SGDOptions>(defaults),
                     std::make_shared<internal::FusedOf<internal::SgdRule>>(precision)) {}

FusedAdam::FusedAdam(std::vector<torch::optim::OptimizerParamGroup> groups,
                     torch::optim::AdamOptions defaults, const Precision& precision)
    : FusedOptimizer(std::move(groups), std::make_unique<torch::optim::AdamOptions>(defaults),
                     std::make_shared<internal::FusedOf<internal::AdamOnly>>(precision)) {}

FusedAdamW::FusedAdamW(std::vector<torch::optim::OptimizerParamGroup> groups,
                       torch::optim::AdamWOptions defaults, const Precision& precision)
    : FusedOptimizer(std::move(groups), std::make_unique<torch::optim::AdamWOptions>(defaults),
                     std::make_shared<internal::FusedOf<internal::AdamWOnly>>(precision)) {}

}  // namespace headroom::libtorch
