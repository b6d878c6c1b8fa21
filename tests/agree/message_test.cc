// What goes over the wire, and what comes out of it.
#include "agree/message.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "agree/agree.h"
#include "tests/support.h"

namespace headroom::internal {
namespace {

// What a network does.
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

constexpr Standing kNowhere;

TEST(Message, IsSmall) { EXPECT_EQ(sizeof(Message), 256u); }  // scripts/agree-model counts on it

RC_GTEST_PROP(Message, SmallestRankIsTheCulpritAndItsNumbersStayTogether, ()) {
  const auto ranks = *rc::gen::unique<std::vector<int>>(rc::gen::inRange(0, 1 << 20));
  RC_PRE(!ranks.empty());
  std::vector<Message> messages;
  Found first;
  for (const int rank : ranks) {
    Found found;
    found.culprit = *rc::gen::inRange<int64_t>(0, kMaxTold);
    found.culprit_inf = *rc::gen::inRange<int64_t>(0, kMaxTold);
    found.culprit_nan = *rc::gen::inRange<int64_t>(0, kMaxTold);
    if (rank == *std::min_element(ranks.begin(), ranks.end())) {
      first = found;
      first.culprit_rank = rank;
    }
    messages.push_back(pack(found, rank, 0.0, kNowhere));
  }
  messages.push_back(pack({}, 1, 0.0, kNowhere));  // one that found nothing
  const Found all = unpack(reduced(messages), false, {});
  RC_ASSERT(all.culprit_rank == first.culprit_rank);
  RC_ASSERT(all.culprit == first.culprit);
  RC_ASSERT(all.culprit_inf == first.culprit_inf);
  RC_ASSERT(all.culprit_nan == first.culprit_nan);
}

TEST(Message, CountsSaturateInsteadOfChangingTheRank) {
  Found found;
  found.culprit = 7;
  found.culprit_inf = std::numeric_limits<int64_t>::max();
  found.inf = 0x1p60;
  const Found all =
      unpack(reduced({pack(found, 3, 0.0, kNowhere), pack(found, 3, 0.0, kNowhere)}), false, {});
  EXPECT_EQ(all.culprit_rank, 3);
  EXPECT_EQ(all.culprit, 7);
  EXPECT_EQ(all.culprit_inf, kMaxTold);
  EXPECT_EQ(all.inf, 0x1p61);
  EXPECT_FALSE(all.finite());
}

TEST(Message, SquaresOfEverySizeAreAddedUp) {
  const std::vector<std::vector<double>> parts = {{1e-200, 2e-200}, {3.0}, {1e200}, {}};
  for (size_t used = 1; used <= parts.size(); ++used) {
    std::vector<Message> messages;
    std::vector<double> whole;
    for (size_t i = 0; i < used; ++i) {
      messages.push_back(
          pack(found_of(measure({view(parts[i])}), 0, 0), static_cast<int>(i), 0.0, kNowhere));
      whole.insert(whole.end(), parts[i].begin(), parts[i].end());
    }
    const double norm = unpack(reduced(messages), false, {}).sum().root();
    EXPECT_DOUBLE_EQ(norm, measure({view(whole)}).norm());
  }
}

TEST(Message, ReplicatedGradientsAreNotAddedUp) {
  const std::vector<float> grad = {3.0f, 4.0f, kInf};
  const Found mine = found_of(measure({view(grad)}), 2, 5);
  const Message all = reduced(
      {pack(mine, 0, 0.0, kNowhere), pack(mine, 1, 0.0, kNowhere), pack(mine, 2, 0.0, kNowhere)});
  const Found replicated = unpack(all, true, mine);
  EXPECT_EQ(replicated.count, 3.0);
  EXPECT_EQ(replicated.inf, 1.0);
  EXPECT_EQ(replicated.new_inf, 2.0);
  EXPECT_EQ(replicated.new_zeros, 5.0);
  EXPECT_EQ(replicated.sum().root(), 5.0);
  const Found sharded = unpack(all, false, mine);
  EXPECT_EQ(sharded.count, 9.0);
  EXPECT_EQ(sharded.inf, 3.0);
  EXPECT_EQ(sharded.sum().root(), std::sqrt(75.0));
}

TEST(Message, TheFirstThingThatDiffersIsFound) {
  for (int which = 0; which < Standing::kCount; ++which) {
    Standing here{{5, 2, 12, 1024, 99, 77, 1.5}};
    const Message mine = pack({}, 0, 1.0, here);
    EXPECT_EQ(difference(reduced({mine, mine})), Standing::kCount);
    for (int i = which; i < Standing::kCount; ++i) here.of[i] += 1;
    const Message all = reduced({mine, pack({}, 1, 1.0, here), mine});
    EXPECT_EQ(difference(all), which);
    const double* const pair = all.maxima + Message::kStanding + 2 * which;
    EXPECT_EQ(pair[0] + pair[1], 1.0);
  }
}

TEST(Message, FingerprintsAreExactInADoubleAndDifferWithEveryInput) {
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
