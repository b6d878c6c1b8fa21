// Scalers of several ranks: what this rank sends to the others, and how it uses the result.
#include <string>

#include "core/check.h"
#include "decide/settings.h"
#include "scaler/scaler.h"

namespace headroom::internal {
namespace {

// Part of the settings that are compared, so that builds with different messages refuse each other.
constexpr double kMessageVersion = 3.0;

// A fingerprint of the names, in their order, and of the sizes if they have to be equal, too:
// shards may differ.
double fingerprint_of(const std::vector<Parameter>& parameters, bool sizes) {
  double sum = 0.0;
  for (const Parameter& parameter : parameters) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (const char c : parameter.name) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
    }
    sum = fingerprint(sum, static_cast<double>(hash >> 12));
    if (sizes) sum = fingerprint(sum, static_cast<double>(parameter.weight.count));
  }
  return sum;
}

}  // namespace

// Called once, by the constructor.
void Scaler::check_ranks() const {
  if (options.ranks == nullptr) return;
  const int size = options.ranks->size();
  const int rank = options.ranks->rank();
  require(rank >= 0 && rank < size && size <= kMaxRanks, ErrorCode::kInvalidArgument, [&] {
    return "ScalerOptions::ranks says that this is rank " + std::to_string(rank) + " of " +
           std::to_string(size) + "; ranks count from 0, and there are at most " +
           std::to_string(kMaxRanks) + ".";
  });
  require(options.device.type == DeviceType::kCPU || options.ranks->enqueues(),
          ErrorCode::kUnsupported,
          "A scaler on a CUDA device needs ranks that agree there (headroom/nccl.h); use those, or "
          "a scaler on the CPU.");
}

void Scaler::set_ranks(std::shared_ptr<Ranks> ranks, RankGradients gradients) {
  require(messages_ == 0, ErrorCode::kWrongOrder,
          "The ranks were given after the first step; give them when the scaler is made.");
  options.ranks = std::move(ranks);
  options.gradients = gradients;
  check_ranks();
}

// The status of this rank for one message. `step` is null in unscale_().
RankStatus Scaler::rank_status(const Optimizer& optimizer, OptimizerEntry* entry,
                               const StepOptions* step) const {
  RankStatus status;
  status.gradients = options.gradients;
  if (entry->names_revision != optimizer.record_->revision) {
    entry->names = fingerprint_of(optimizer.parameters(), status.replicated());
    entry->names_revision = optimizer.record_->revision;
  }
  status.names = entry->names;
  double settings = static_cast<double>(record.policy.rule());
  PolicySettings::visit(record.policy, Fingerprint{&settings});
  const StepOptions none;
  const StepOptions& given = step != nullptr ? *step : none;
  for (const double setting :
       {kMessageVersion, static_cast<double>(given.max_norm),
        static_cast<double>(given.skip_above_norm), static_cast<double>(options.gradients),
        static_cast<double>(options.enabled), status.replicated() ? status.names : 0.0}) {
    settings = fingerprint(settings, setting);
  }
  const ScaleNumbers& numbers = record.numbers;  // a CUDA device fills in its own, see pack_kernel
  status.fields[RankStatus::kMessage] = static_cast<double>(messages_);
  status.fields[RankStatus::kCall] = call_number(entry->ordinal, step == nullptr);
  status.fields[RankStatus::kUpdates] = static_cast<double>(numbers.steps);
  status.fields[RankStatus::kScale] = options.enabled ? static_cast<double>(numbers.scale) : 1.0;
  status.fields[RankStatus::kSettings] = settings;
  double state = 0.0;
  visit_numbers(record.policy.rule(), numbers, Fingerprint{&state});
  status.fields[RankStatus::kState] = state;
  return status;
}

// The culprit with its rank, if there are several. A tensor of another rank is called by the name
// that it has here only if all ranks have the same names; otherwise by its index there.
std::string Scaler::culprit_text(const GradStats& stats, bool same_names,
                                 const std::vector<Parameter>& parameters) const {
  const int64_t rank = stats.culprit_rank;
  if (rank < 0) return describe_culprit(stats, parameters);
  const bool known = same_names || rank == options.ranks->rank();
  return "rank " + std::to_string(rank) + ": " + (known ? "" : "its ") +
         describe_culprit(stats, known ? parameters : std::vector<Parameter>{});
}

// Replicated gradients: all ranks have the same ones, so it is enough to look at this rank's.
CombinedStats Scaler::agree(const Optimizer& optimizer, OptimizerEntry* entry,
                            const StepOptions* step, const GradStats& mine) {
  const std::vector<Parameter>& parameters = optimizer.parameters();
  if (options.ranks == nullptr) return {mine, culprit_text(mine, true, parameters)};
  const RankStatus status = rank_status(optimizer, entry, step);
  ++messages_;
  const Agreement agreement = internal::agree(*options.ranks, status, mine);
  const bool any = status.replicated() ? has_gradient(optimizer) : agreement.stats.count > 0;
  return {agreement.stats, culprit_text(agreement.stats, agreement.same_names, parameters), any};
}

}  // namespace headroom::internal
