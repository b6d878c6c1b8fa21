// The optimizers' options, and how each becomes an update rule.
#include <headroom/optimizer.h>

#include <string>

#include "apply/checks.h"
#include "apply/rules.h"
#include "core/check.h"

namespace headroom {
namespace {

internal::RuleSettings settings(const SGDOptions& options) {
  internal::RuleSettings s;
  s.rule = options.momentum == 0.0 ? internal::Rule::kSgd : internal::Rule::kSgdMomentum;
  s.lr = options.lr;
  s.momentum = options.momentum;
  s.dampening = options.dampening;
  s.weight_decay = options.weight_decay;
  s.nesterov = options.nesterov;
  return s;
}

template <typename Options>
internal::RuleSettings adam_settings(const Options& options, bool decoupled) {
  internal::RuleSettings s;
  s.rule = internal::Rule::kAdam;
  s.decoupled = decoupled;
  s.lr = options.lr;
  s.beta1 = options.beta1;
  s.beta2 = options.beta2;
  s.eps = options.eps;
  s.weight_decay = options.weight_decay;
  return s;
}

internal::RuleSettings settings(const AdamOptions& options) {
  return adam_settings(options, false);
}
internal::RuleSettings settings(const AdamWOptions& options) {
  return adam_settings(options, true);
}

template <typename Options>
internal::RuleSettings checked_settings(const Options& options) {
  const internal::RuleSettings checked = settings(options);
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
  groups_.reserve(groups_.size() + 1);
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

template <typename Options>
void GroupedOptimizer<Options>::set_lr(double lr) {
  internal::check_whole(!groups_.empty());
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

}  // namespace headroom
