#ifndef HEADROOM_SRC_AGREE_AGREE_H_
#define HEADROOM_SRC_AGREE_AGREE_H_

#include <headroom/agree.h>

#include <string>

#include "agree/message.h"

namespace headroom::internal {

/// Where a rank stands before it asks the others; its norm is filled in by agree().
struct Stand {
  RankGradients gradients = RankGradients::kReplicated;
  double list = 0.0;  // a fingerprint of the names of its tensors
  Standing standing;
};

/// What all ranks found.
struct Agreement {
  Found found;
  bool same_list = false;  // their tensors have the same names
};

Found found_of(const GradStats& stats, int64_t new_inf, int64_t new_zeros);

/// `stats` with everything that ranks agree on taken from `found`.
GradStats stats_of(const Found& found, GradStats stats);

/// Asks all ranks. Throws Error(kRanksDiffer) on every one of them if they differ in where they
/// stand, and what Ranks::reduce throws.
Agreement agree(Ranks& ranks, const Stand& stand, const Found& mine);

/// Standing::kCall: of the n-th optimizer that the scaler has met.
double call_number(int64_t optimizer, bool unscale);

/// One sentence that says in what the ranks differ; `low` and `high` are the ends.
std::string differ_sentence(int which, double low, double high);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_AGREE_AGREE_H_
