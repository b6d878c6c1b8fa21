#ifndef HEADROOM_SRC_AGREE_AGREE_H_
#define HEADROOM_SRC_AGREE_AGREE_H_

#include <string>

#include "agree/message.h"

namespace headroom::internal {

/// What all ranks found.
struct Agreement {
  GradStats stats;
  bool same_names = false;  // their tensors have the same names, in the same order
};

/// Waits for all ranks. Throws Error(kRanksDiffer) on every one of them if they differ in their
/// status, and what Ranks::reduce throws.
Agreement agree(Ranks& ranks, const RankStatus& status, const GradStats& mine);

/// RankStatus::kCall for the n-th optimizer that the scaler has seen.
double call_number(int64_t optimizer, bool unscale);

/// One sentence that says in what the ranks differ; `low` and `high` are the extremes.
std::string difference_sentence(int field, double low, double high);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_AGREE_AGREE_H_
