// The exchange with the other ranks on the host, and the error messages about it. A scaler on a
// CUDA device does the exchange in kernels (scaler/cuda.cu).
#include "agree/agree.h"

#include <headroom/error.h>

#include "core/check.h"

namespace headroom {

Ranks::~Ranks() = default;

void Ranks::enqueue(double*, size_t, double*, size_t, void*) {
  throw Error(ErrorCode::kUnsupported,
              "These ranks communicate on the host and cannot serve a scaler on a CUDA device; use "
              "NCCL's, or a scaler on the CPU.");
}

void Ranks::throw_did_not_come(const std::string& how) {
  throw Error(
      ErrorCode::kRankLost,
      "Another rank did not reach the same step " + how +
          "; it has ended, is stuck or is out of step. Look at its output, end the job and start "
          "from the last checkpoint.");
}

void Ranks::throw_lost_before() {
  throw Error(ErrorCode::kRankLost,
              "Another rank was lost before; end the job and start from the last checkpoint.");
}

namespace internal {
namespace {

// The inverse of call_number(): "step() of its optimizer 0".
std::string call_name(double call) {
  const auto number = static_cast<int64_t>(call);
  return std::string(number % 2 == 1 ? "unscale_()" : "step()") + " of its optimizer " +
         std::to_string(number / 2);
}

}  // namespace

double call_number(int64_t optimizer, bool unscale) {
  return static_cast<double>(2 * optimizer + unscale);
}

std::string difference_sentence(int field, double low, double high) {
  const std::string ends = number(low) + " and " + number(high);
  switch (field) {
    case RankStatus::kMessage:
    case RankStatus::kUpdates:
      return std::string("The ranks are out of step: ") +
             (field == RankStatus::kUpdates ? "after updates " : "at messages ") + ends +
             "; make every rank step and update equally often, and load the same checkpoint.";
    case RankStatus::kCall:
      return "The ranks are out of step: one is in " + call_name(low) + ", another in " +
             call_name(high) + "; make the same calls in the same order on every rank.";
    case RankStatus::kScale:
      return "The ranks have gradients of different scales, " + ends +
             "; call scale() on every rank in every round, and set or load the same scale.";
    case RankStatus::kSettings:
      return "The ranks differ in policy, max_norm, enabled or RankGradients, or in the names, "
             "sizes or order of replicated parameters; give every rank the same.";
    case RankStatus::kState:
      return "The ranks have the same scale but different states; load the same saved "
             "scaler on every rank.";
    default:
      return "The ranks have diverged: their gradients should be the same, but have norms "
             "of " +
             ends +
             " before unscaling; average the gradients over the ranks before step(), or use "
             "RankGradients::kSharded (Python: gradients=\"sharded\") if each rank has a part. "
             "Weights are as before the step.";
  }
}

Agreement agree(Ranks& ranks, const RankStatus& status, const GradStats& mine) {
  Message message = pack(mine, ranks.rank(), status);
  ranks.reduce(message.sums, Message::kSums, message.maxima, Message::kMaxima);
  const int field = difference(message);
  require(field == RankStatus::kCount, ErrorCode::kRanksDiffer,
          [&] { return difference_sentence(field, message.low(field), message.high(field)); });
  return {unpack(message, status.replicated(), mine), message.same_names()};
}

}  // namespace internal
}  // namespace headroom
