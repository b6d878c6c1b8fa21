// GroupedOptimizer: converts the options of SGD, Adam, AdamW and Lion to update rules.
#include <headroom/optimizer.h>

#include <string>
#include <type_traits>

#include "apply/checks.h"
#include "apply/rules.h"
#include "core/check.h"

namespace headroom {
namespace {

using internal::Rule;
using internal::RuleSettings;

// The rule depends on whether there is momentum: without it no state buffer is allocated.
RuleSettings settings(const SGDOptions& options) {
  return {.rule = options.momentum == 0.0 ? Rule::kSgd : Rule::kSgdMomentum,
          .nesterov = options.nesterov,
          .lr = options.lr,
          .weight_decay = options.weight_decay,
          .momentum = options.momentum,
          .dampening = options.dampening};
}

template <typename Options>  // AdamOptions or AdamWOptions
RuleSettings settings(const Options& options) {
  return {.rule = Rule::kAdam,
          .decoupled = std::is_same_v<Options, AdamWOptions>,
          .lr = options.lr,
          .weight_decay = options.weight_decay,
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = options.eps};
}

RuleSettings settings(const LionOptions& options) {
  return {.rule = Rule::kLion,
          .decoupled = true,
          .lr = options.lr,
          .weight_decay = options.weight_decay,
          .beta1 = options.beta1,
          .beta2 = options.beta2};
}

template <typename Options>
RuleSettings checked_settings(const Options& options) {
  const RuleSettings checked = settings(options);
  internal::validate(checked);
  return checked;
}

}  // namespace

template <typename Options>
GroupedOptimizer<Options>::GroupedOptimizer(std::vector<Parameter> parameters,
                                            const Options& options, const Precision& precision)
    : FusedOptimizer(precision) {
  add_group(std::move(parameters), options);
}

template <typename Options>
size_t GroupedOptimizer<Options>::add_group(std::vector<Parameter> parameters,
                                            const Options& options) {
  groups_.reserve(groups_.size() + 1);  // push_back() below must not throw
  const size_t group = append_group(std::move(parameters), checked_settings(options));
  groups_.push_back(options);
  return group;
}

template <typename Options>
const Options& GroupedOptimizer<Options>::options(size_t group) const {
  internal::require(group < groups_.size(), ErrorCode::kInvalidArgument, [&] {
    return "There is no parameter group " + std::to_string(group) + "; there are " +
           std::to_string(groups_.size()) + ".";
  });
  return groups_[group];
}

template <typename Options>
void GroupedOptimizer<Options>::set_options(const Options& options, size_t group) {
  this->options(group);  // checks the index
  change_group(group, checked_settings(options));
  groups_[group] = options;
}

// Changes either all groups or, if one refuses the value, none.
template <typename Options>
void GroupedOptimizer<Options>::set_lr(double lr) {
  internal::check_not_moved_from(!groups_.empty());
  std::vector<Options> changed = groups_;
  for (Options& options : changed) {
    options.lr = lr;
    checked_settings(options);  // all of them, before any is set
  }
  for (size_t group = 0; group < changed.size(); ++group) set_options(changed[group], group);
}

template class GroupedOptimizer<SGDOptions>;
template class GroupedOptimizer<AdamOptions>;
template class GroupedOptimizer<AdamWOptions>;
template class GroupedOptimizer<LionOptions>;

}  // namespace headroom
