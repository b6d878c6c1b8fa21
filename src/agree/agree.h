// agree/ combines the statistics of several ranks, so that all of them make the same decision. It
// must not know about tensors, optimizers or networks: Ranks carries the message.
#ifndef HEADROOM_SRC_AGREE_AGREE_H_
#define HEADROOM_SRC_AGREE_AGREE_H_

#include <string>

#include "agree/message.h"

namespace headroom::internal {

/// The combined result of all ranks.
struct Agreement {
  GradStats stats;
  bool same_names = false;  // the ranks' tensors have the same names, in the same order
};

/// Waits for all ranks. Throws Error(kRanksDiffer) on every rank if their statuses differ, and
/// whatever Ranks::reduce() throws.
Agreement agree(Ranks& ranks, const RankStatus& status, const GradStats& mine);

/// The value of RankStatus::kCall for the n-th optimizer of the scaler.
double call_number(int64_t optimizer, bool unscale);

/// The error message for a field in which the ranks differ; `low` and `high` are the extremes.
std::string difference_sentence(int field, double low, double high);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_AGREE_AGREE_H_
