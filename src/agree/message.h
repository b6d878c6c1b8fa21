// The message that ranks exchange before each decision. It has the same fixed size in every step,
// and every number in it is either summed or maximised over the ranks, so that the reductions of
// any communication library can carry it. The same source runs on the host and in CUDA kernels.
#ifndef HEADROOM_SRC_AGREE_MESSAGE_H_
#define HEADROOM_SRC_AGREE_MESSAGE_H_

#include <headroom/agree.h>
#include <headroom/export.h>
#include <headroom/measure.h>

#include <bit>
#include <cstdint>

#include "measure/stats.h"

namespace headroom::internal {

/// What has to be equal on all ranks before they may step together.
struct RankStatus {
  enum Field : int {
    kMessage,   // messages of this scaler so far
    kCall,      // step() or unscale_(), and of which optimizer: call_number()
    kUpdates,   // updates so far
    kScale,     // of the gradients
    kSettings,  // fingerprint of policy, clipping, kind of gradients, replicated parameters
    kState,     // fingerprint of the scaler's state
    kNorm,      // of replicated gradients, else 0
    kCount
  };
  double fields[kCount] = {};
  RankGradients gradients = RankGradients::kReplicated;
  double names = 0.0;  // fingerprint of the tensors' names and sizes; may differ if sharded

  HEADROOM_HOST_DEVICE bool replicated() const { return gradients == RankGradients::kReplicated; }
};

/// The numbers that are sent.
struct Message {
  enum Sum { kCount, kInf, kNan, kNewInf, kNewZeros, kSquares, kSums = kSquares + 3 };
  // The counts are sent a second time as maxima, for ranks that all have the same gradients. The
  // numbers of the culprit have the rank in their upper bits, so that all maxima come from the same
  // rank. Fields that have to be equal are sent as x and -x: the maxima are the largest x and the
  // negated smallest.
  enum Maximum {
    kMaxInf,
    kMaxNan,
    kMaxNewInf,
    kMaxNewZeros,
    kAmax,
    kCulprit,
    kCulpritInf,
    kCulpritNan,
    kNames,
    kStatus = kNames + 2,
    kMaxima = kStatus + 2 * RankStatus::kCount
  };
  double sums[kSums];
  double maxima[kMaxima];

  /// The smallest and largest value on any rank.
  HEADROOM_HOST_DEVICE double low(int field) const { return -maxima[kStatus + 2 * field + 1]; }
  HEADROOM_HOST_DEVICE double high(int field) const { return maxima[kStatus + 2 * field]; }
  HEADROOM_HOST_DEVICE bool same_names() const { return maxima[kNames] == -maxima[kNames + 1]; }
};

/// The largest number of ranks, and the largest value of a culprit that is sent: together they use
/// 53 bits, which a double holds exactly.
inline constexpr int64_t kMaxRanks = int64_t{1} << 20;
inline constexpr int64_t kMaxSent = (int64_t{1} << 32) - 1;

/// Packs a rank and a value into a number. The number of a smaller rank is larger for any value, so
/// that the maximum is that of the first rank.
HEADROOM_HOST_DEVICE inline double with_rank(int64_t rank, int64_t value) {
  const int64_t sent = value < kMaxSent ? value : kMaxSent;
  return static_cast<double>((kMaxRanks - rank) * (kMaxSent + 1) + sent);
}
HEADROOM_HOST_DEVICE inline int64_t rank_in(double number) {
  return kMaxRanks - static_cast<int64_t>(number) / (kMaxSent + 1);
}
HEADROOM_HOST_DEVICE inline int64_t value_in(double number) {
  return static_cast<int64_t>(number) % (kMaxSent + 1);
}

/// A hash of 52 bits, which a double holds exactly. `seed` is the fingerprint of the values before.
HEADROOM_HOST_DEVICE inline double fingerprint(double seed, double value) {
  const auto a = std::bit_cast<uint64_t>(seed);
  const auto b = std::bit_cast<uint64_t>(value);
  uint64_t mixed = a ^ (b + 0x9E3779B97F4A7C15u + (a << 6) + (a >> 2));  // boost::hash_combine
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((mixed ^ (mixed >> 31)) >> 12);
}

/// A visitor that combines all visited values into one fingerprint.
struct Fingerprint {
  double* sum;
  template <typename Name, typename T>
  HEADROOM_HOST_DEVICE void operator()(const Name&, const T& value) const {
    *sum = fingerprint(*sum, static_cast<double>(value));
  }
};

/// The message of this rank. Adds the norm to the status.
HEADROOM_HOST_DEVICE inline Message pack(const GradStats& stats, int rank, RankStatus status) {
  status.fields[RankStatus::kNorm] = status.replicated() ? finite_norm(stats) : 0.0;
  Message message{};
  double* const sums = message.sums;
  double* const maxima = message.maxima;
  // Counts are doubles: exact up to 2^53, and they never wrap.
  sums[Message::kCount] = static_cast<double>(stats.count);
  sums[Message::kInf] = maxima[Message::kMaxInf] = static_cast<double>(stats.inf_count);
  sums[Message::kNan] = maxima[Message::kMaxNan] = static_cast<double>(stats.nan_count);
  sums[Message::kNewInf] = maxima[Message::kMaxNewInf] = static_cast<double>(stats.new_inf);
  sums[Message::kNewZeros] = maxima[Message::kMaxNewZeros] = static_cast<double>(stats.new_zeros);
  for (int i = 0; i < 3; ++i) sums[Message::kSquares + i] = stats.squares[i];
  maxima[Message::kAmax] = stats.amax;
  if (stats.culprit >= 0) {
    maxima[Message::kCulprit] = with_rank(rank, stats.culprit);
    maxima[Message::kCulpritInf] = with_rank(rank, stats.culprit_inf);
    maxima[Message::kCulpritNan] = with_rank(rank, stats.culprit_nan);
  }
  maxima[Message::kNames] = status.names;
  maxima[Message::kNames + 1] = -status.names;
  for (int i = 0; i < RankStatus::kCount; ++i) {
    maxima[Message::kStatus + 2 * i] = status.fields[i];
    maxima[Message::kStatus + 2 * i + 1] = -status.fields[i];
  }
  return message;
}

/// The first field in which the ranks differ, or RankStatus::kCount. Norms are compared only where
/// all gradients are finite.
HEADROOM_HOST_DEVICE inline int difference(const Message& all) {
  const bool finite = all.sums[Message::kInf] == 0.0 && all.sums[Message::kNan] == 0.0;
  for (int i = 0; i < RankStatus::kCount; ++i) {
    if (i == RankStatus::kNorm && !finite) continue;
    if (all.low(i) != all.high(i)) return i;
  }
  return RankStatus::kCount;
}

/// The statistics of all ranks. Replicated gradients are not summed: each rank has all of them.
HEADROOM_HOST_DEVICE inline GradStats unpack(const Message& all, bool replicated,
                                             const GradStats& mine) {
  GradStats stats = mine;
  const double* const counts =
      replicated ? all.maxima + Message::kMaxInf : all.sums + Message::kInf;
  stats.inf_count = static_cast<int64_t>(counts[0]);
  stats.nan_count = static_cast<int64_t>(counts[1]);
  stats.new_inf = static_cast<int64_t>(counts[2]);
  stats.new_zeros = static_cast<int64_t>(counts[3]);
  if (!replicated) {
    stats.count = static_cast<int64_t>(all.sums[Message::kCount]);
    for (int i = 0; i < 3; ++i) stats.squares[i] = all.sums[Message::kSquares + i];
  }
  stats.amax = all.maxima[Message::kAmax];
  const double culprit = all.maxima[Message::kCulprit];
  if (culprit > 0.0) {
    stats.culprit_rank = rank_in(culprit);
    stats.culprit = value_in(culprit);
    stats.culprit_inf = value_in(all.maxima[Message::kCulpritInf]);
    stats.culprit_nan = value_in(all.maxima[Message::kCulpritNan]);
  }
  return stats;
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_AGREE_MESSAGE_H_
