#include "agree/agree.h"

#include <headroom/error.h>

#include <cmath>

#include "core/check.h"

namespace headroom {

Ranks::~Ranks() = default;

void Ranks::enqueue(double*, size_t, double*, size_t, void*) {
  throw Error(
      ErrorCode::kUnsupported,
      "These ranks talk on the host and cannot serve a scaler on a CUDA device; use NCCL's, "
      "or a scaler on the CPU.");
}

void Ranks::throw_did_not_come(const std::string& how) {
  throw Error(ErrorCode::kRankLost,
              "Another rank did not come to the same step " + how +
                  "; it is gone, stuck or out of step. Look at its output, end the job and start "
                  "from the last checkpoint.");
}

void Ranks::throw_lost_before() {
  throw Error(ErrorCode::kRankLost,
              "Another rank was lost before; end the job and start from the last checkpoint.");
}

namespace internal {
namespace {

std::string call_name(double call) {
  const auto number = static_cast<int64_t>(call);
  return std::string(number % 2 == 1 ? "unscale_()" : "step()") + " of its optimizer " +
         std::to_string(number / 2);
}

}  // namespace

Found found_of(const GradStats& stats, int64_t new_inf, int64_t new_zeros) {
  Found found;
  found.count = static_cast<double>(stats.count);
  found.inf = static_cast<double>(stats.inf_count);
  found.nan = static_cast<double>(stats.nan_count);
  found.new_inf = static_cast<double>(new_inf);
  found.new_zeros = static_cast<double>(new_zeros);
  found.squares[stats.squares.exponent / 600 + 1] = stats.squares.value;
  found.amax = stats.amax;
  found.culprit = stats.culprit;
  found.culprit_inf = stats.culprit_inf;
  found.culprit_nan = stats.culprit_nan;
  return found;
}

GradStats stats_of(const Found& found, GradStats stats) {
  stats.count = static_cast<int64_t>(found.count);
  stats.inf_count = static_cast<int64_t>(found.inf);
  stats.nan_count = static_cast<int64_t>(found.nan);
  stats.squares = found.sum();
  stats.amax = found.amax;
  stats.culprit = found.culprit;
  stats.culprit_inf = found.culprit_inf;
  stats.culprit_nan = found.culprit_nan;
  return stats;
}

double call_number(int64_t optimizer, bool unscale) {
  return static_cast<double>(2 * optimizer + unscale);
}

std::string differ_sentence(int which, double low, double high) {
  const std::string ends = number(low) + " and " + number(high);
  switch (which) {
    case Standing::kMessage:
    case Standing::kRound:
      return std::string("The ranks are out of step: ") +
             (which == Standing::kRound ? "after updates " : "at messages ") + ends +
             "; make every rank step and update equally often, and load the same checkpoint.";
    case Standing::kCall:
      return "The ranks are out of step: one is in " + call_name(low) + ", another in " +
             call_name(high) + "; make the same calls in the same order on every rank.";
    case Standing::kScale:
      return "The ranks have gradients of different scales, " + ends +
             "; call scale() on every rank in every round, and set or load the same scale.";
    case Standing::kRules:
      return "The ranks differ in policy, max_norm, enabled or RankGradients, or in the names, "
             "sizes "
             "or order of replicated parameters; give every rank the same.";
    case Standing::kState:
      return "The ranks have the same scale but remember different steps; load the same saved "
             "scaler on every rank.";
    default:
      return "The ranks have drifted apart: their gradients should be the same, but have norms "
             "of " +
             ends +
             " before unscaling; average the gradients over the ranks before step(), or use "
             "RankGradients::kSharded if each rank has a part. Weights are as before the step.";
  }
}

Agreement agree(Ranks& ranks, const Stand& stand, const Found& mine) {
  const bool replicated = stand.gradients == RankGradients::kReplicated;
  Stand here = stand;
  here.standing.of[Standing::kNorm] = replicated ? mine.sum().root() : 0.0;
  Message message = pack(mine, ranks.rank(), here.list, here.standing);
  ranks.reduce(message.sums, Message::kSums, message.maxima, Message::kMaxima);
  const int which = difference(message);
  require(which == Standing::kCount, ErrorCode::kRanksDiffer, [&] {
    const double* const pair = message.maxima + Message::kStanding + 2 * which;
    return differ_sentence(which, -pair[1], pair[0]);
  });
  return {unpack(message, replicated, mine), equal_on_all(message.maxima + Message::kList)};
}

}  // namespace internal
}  // namespace headroom
