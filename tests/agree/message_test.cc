// The message that ranks exchange: pack(), an all-reduce, unpack().
#include "agree/message.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "agree/agree.h"
#include "tests/support.h"

namespace headroom::internal {
namespace {

// The all-reduce of a network.
Message reduced(const std::vector<Message>& messages) {
  Message all = messages.at(0);
  for (size_t m = 1; m < messages.size(); ++m) {
    for (int i = 0; i < Message::kSums; ++i) all.sums[i] += messages[m].sums[i];
    for (int i = 0; i < Message::kMaxima; ++i) {
      all.maxima[i] = std::max(all.maxima[i], messages[m].maxima[i]);
    }
  }
  return all;
}

RankStatus status_of(RankGradients gradients) {
  RankStatus status;
  status.gradients = gradients;
  return status;
}
const RankStatus kSharded = status_of(RankGradients::kSharded);
const RankStatus kReplicated = status_of(RankGradients::kReplicated);

TEST(Message, Is256Bytes) { EXPECT_EQ(sizeof(Message), 256u); }  // scripts/agree-model assumes it

RC_GTEST_PROP(Message, CulpritIsTheLowestRankWithItsOwnCounts, ()) {
  const auto ranks = *rc::gen::unique<std::vector<int>>(rc::gen::inRange(0, 1 << 20));
  RC_PRE(!ranks.empty());
  std::vector<Message> messages;
  GradStats first;
  for (const int rank : ranks) {
    GradStats found;
    found.culprit = *rc::gen::inRange<int64_t>(0, kMaxSent);
    found.culprit_inf = *rc::gen::inRange<int64_t>(0, kMaxSent);
    found.culprit_nan = *rc::gen::inRange<int64_t>(0, kMaxSent);
    if (rank == *std::min_element(ranks.begin(), ranks.end())) {
      first = found;
      first.culprit_rank = rank;
    }
    messages.push_back(pack(found, rank, kSharded));
  }
  messages.push_back(pack({}, 1, kSharded));  // a rank without a culprit
  const GradStats all = unpack(reduced(messages), false, {});
  RC_ASSERT(all.culprit_rank == first.culprit_rank);
  RC_ASSERT(all.culprit == first.culprit);
  RC_ASSERT(all.culprit_inf == first.culprit_inf);
  RC_ASSERT(all.culprit_nan == first.culprit_nan);
}

TEST(Message, LargeCountsSaturateAndKeepTheRank) {
  GradStats found;
  found.culprit = 7;
  found.culprit_inf = std::numeric_limits<int64_t>::max();
  found.inf_count = int64_t{1} << 60;
  const GradStats all =
      unpack(reduced({pack(found, 3, kSharded), pack(found, 3, kSharded)}), false, {});
  EXPECT_EQ(all.culprit_rank, 3);
  EXPECT_EQ(all.culprit, 7);
  EXPECT_EQ(all.culprit_inf, kMaxSent);
  EXPECT_EQ(all.inf_count, int64_t{1} << 61);
  EXPECT_FALSE(all.finite());
}

TEST(Message, NormOfShardsIsAccurateForMixedMagnitudes) {
  const std::vector<std::vector<double>> parts = {{1e-200, 2e-200}, {3.0}, {1e200}, {}};
  for (size_t used = 1; used <= parts.size(); ++used) {
    std::vector<Message> messages;
    std::vector<double> whole;
    for (size_t i = 0; i < used; ++i) {
      messages.push_back(pack(measure({view(parts[i])}), static_cast<int>(i), kSharded));
      whole.insert(whole.end(), parts[i].begin(), parts[i].end());
    }
    const double norm = unpack(reduced(messages), false, {}).norm();
    EXPECT_DOUBLE_EQ(norm, measure({view(whole)}).norm());
  }
}

TEST(Message, ReplicatedStatsAreNotSummed) {
  const std::vector<float> grad = {3.0f, 4.0f, kInf};
  GradStats mine = measure({view(grad)});
  mine.new_inf = 2;
  mine.new_zeros = 5;
  const Message all =
      reduced({pack(mine, 0, kReplicated), pack(mine, 1, kReplicated), pack(mine, 2, kReplicated)});
  const GradStats replicated = unpack(all, true, mine);
  EXPECT_EQ(replicated.count, 3);
  EXPECT_EQ(replicated.inf_count, 1);
  EXPECT_EQ(replicated.new_inf, 2);
  EXPECT_EQ(replicated.new_zeros, 5);
  EXPECT_EQ(finite_norm(replicated), 5.0);
  const GradStats sharded = unpack(all, false, mine);
  EXPECT_EQ(sharded.count, 9);
  EXPECT_EQ(sharded.inf_count, 3);
  EXPECT_EQ(finite_norm(sharded), std::sqrt(75.0));
}

TEST(Message, ReportsTheFirstDifferingField) {
  for (int field = 0; field < RankStatus::kNorm; ++field) {  // the norm is filled in by pack()
    RankStatus status = kSharded;
    for (int i = 0; i < RankStatus::kNorm; ++i) status.fields[i] = 100.0 + i;
    const Message mine = pack({}, 0, status);
    EXPECT_EQ(difference(reduced({mine, mine})), RankStatus::kCount);
    for (int i = field; i < RankStatus::kNorm; ++i) status.fields[i] += 1;
    const Message all = reduced({mine, pack({}, 1, status), mine});
    EXPECT_EQ(difference(all), field);
    EXPECT_EQ(all.high(field) - all.low(field), 1.0);
  }
}

TEST(Message, DifferentNormsOfReplicatedGradientsAreADifference) {
  const std::vector<float> first = {3.0f}, second = {4.0f}, bad = {kInf};
  const auto message = [](const std::vector<float>& grad, const RankStatus& status) {
    return pack(measure({view(grad)}), 0, status);
  };
  EXPECT_EQ(difference(reduced({message(first, kReplicated), message(second, kReplicated)})),
            RankStatus::kNorm);
  EXPECT_EQ(difference(reduced({message(first, kSharded), message(second, kSharded)})),
            RankStatus::kCount);
  EXPECT_EQ(difference(reduced({message(first, kReplicated), message(bad, kReplicated)})),
            RankStatus::kCount)
      << "the overflow is handled before norms are compared";
}

TEST(Message, FingerprintsFitADoubleAndDependOnEveryInput) {
  double last = 0.0;
  for (int i = 0; i < 1000; ++i) {
    const double next = fingerprint(last, i);
    EXPECT_LT(next, 0x1p52);
    EXPECT_EQ(next, std::floor(next));
    EXPECT_NE(next, fingerprint(last, i + 1));
    EXPECT_NE(next, fingerprint(last + 1, i));
    last = next;
  }
}

}  // namespace
}  // namespace headroom::internal
