// GradScaler where several ranks train together: what it tells the others, and what it makes of
// their answer.
#include <headroom/scaler.h>

#include <string>

#include "agree/agree.h"
#include "core/check.h"
#include "scaler/members.h"

namespace headroom {

using internal::require;

namespace {

// Ranks whose builds send other messages shall not understand each other.
constexpr double kMessageVersion = 2.0;

// Of names and sizes, in their order.
double fingerprint_of(const std::vector<Parameter>& parameters) {
  double sum = 0.0;
  for (const Parameter& parameter : parameters) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (const char c : parameter.name) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
    }
    sum = internal::fingerprint(sum, static_cast<double>(hash >> 12));
    sum = internal::fingerprint(sum, static_cast<double>(parameter.weight.count));
  }
  return sum;
}

}  // namespace

void GradScaler::check_ranks() const {
  if (options_.ranks == nullptr) return;
  const int size = options_.ranks->size();
  const int rank = options_.ranks->rank();
  require(rank >= 0 && rank < size && size <= internal::kMaxRanks, ErrorCode::kInvalidArgument,
          [&] {
            return "ScalerOptions::ranks says that this is rank " + std::to_string(rank) + " of " +
                   std::to_string(size) + "; ranks count from 0, and there are at most " +
                   std::to_string(internal::kMaxRanks) + ".";
          });
  require(options_.device.type == DeviceType::kCPU || options_.ranks->enqueues(),
          ErrorCode::kUnsupported, [] {
            return "A scaler on a CUDA device needs ranks that agree there (headroom/nccl.h); use "
                   "those, or a scaler on the CPU.";
          });
}

// Where this rank stands before it asks the others about an optimizer. `step`: null in unscale_().
internal::Stand GradScaler::stand(const Optimizer& optimizer, Known* known,
                                  const StepOptions* step) const {
  internal::Stand stand;
  stand.gradients = options_.gradients;
  if (known->named != optimizer.identity_->revision) {
    known->names = fingerprint_of(optimizer.parameters());
    known->named = optimizer.identity_->revision;
  }
  stand.list = known->names;
  double rules = internal::policy_fingerprint(policy_);
  for (const double rule :
       {kMessageVersion, static_cast<double>(step != nullptr ? step->max_norm : 0.0f),
        static_cast<double>(options_.gradients), static_cast<double>(options_.enabled)}) {
    rules = internal::fingerprint(rules, rule);
  }
  const bool replicated = options_.gradients == RankGradients::kReplicated;
  if (replicated) rules = internal::fingerprint(rules, stand.list);
  stand.standing.of[internal::Standing::kMessage] = static_cast<double>(messages_);
  stand.standing.of[internal::Standing::kCall] =
      internal::call_number(known->ordinal, step == nullptr);
  stand.standing.of[internal::Standing::kRound] = static_cast<double>(state_.steps);
  stand.standing.of[internal::Standing::kScale] = static_cast<double>(known->scale);
  stand.standing.of[internal::Standing::kRules] = rules;
  stand.standing.of[internal::Standing::kState] = internal::state_fingerprint(state_);
  return stand;
}

// The culprit by its name where that is known, with its rank if there are several.
std::string GradScaler::culprit_text(const GradStats& stats, int rank, bool same_list,
                                     const std::vector<Parameter>& parameters) const {
  if (rank < 0) return describe_culprit(stats, parameters);
  const bool known = same_list || rank == options_.ranks->rank();
  return "rank " + std::to_string(rank) + ": " + (known ? "" : "its ") +
         describe_culprit(stats, known ? parameters : std::vector<Parameter>{});
}

// What all ranks found; alone, what this one did.
GradScaler::Finding GradScaler::agree(const Optimizer& optimizer, Known* known,
                                      const StepOptions* step, Finding mine) {
  if (options_.ranks == nullptr) {
    mine.culprit = culprit_text(mine.stats, -1, true, optimizer.parameters());
    return mine;
  }
  const internal::Stand here = stand(optimizer, known, step);
  ++messages_;
  const auto [found, same_list] = internal::agree(
      *options_.ranks, here, internal::found_of(mine.stats, mine.new_inf, mine.new_zeros));
  mine.stats = internal::stats_of(found, std::move(mine.stats));
  mine.new_inf = static_cast<int64_t>(found.new_inf);
  mine.new_zeros = static_cast<int64_t>(found.new_zeros);
  const bool replicated = options_.gradients == RankGradients::kReplicated;
  mine.any = replicated ? has_gradient(optimizer) : found.count > 0.0;
  mine.culprit_rank = static_cast<int>(found.culprit_rank);
  mine.culprit = culprit_text(mine.stats, mine.culprit_rank, same_list, optimizer.parameters());
  return mine;
}

}  // namespace headroom
