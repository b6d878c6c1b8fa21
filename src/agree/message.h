// agree/ combines what the ranks found. It knows numbers only: no tensors, no optimizers, no way to
// send. The message is the same fixed size in every step, and every number in it is either added
// or maximised, so that any network's reduction will do.
#ifndef HEADROOM_SRC_AGREE_MESSAGE_H_
#define HEADROOM_SRC_AGREE_MESSAGE_H_

#include <headroom/export.h>
#include <headroom/measure.h>

#include <cstdint>

namespace headroom::internal {

/// What a rank found, or what all of them did. Counts are doubles: exact up to 2^53, and they never
/// wrap.
struct Found {
  double count = 0.0;
  double inf = 0.0;
  double nan = 0.0;
  double new_inf = 0.0;  // these two by unscale_
  double new_zeros = 0.0;
  double squares[3] = {};  // of small x 2^600, ordinary, and large x 2^-600 elements
  double amax = 0.0;
  int64_t culprit_rank = -1;
  int64_t culprit = -1;  // index in the list of that rank
  int64_t culprit_inf = 0;
  int64_t culprit_nan = 0;

  HEADROOM_HOST_DEVICE bool finite() const { return inf == 0.0 && nan == 0.0; }
  HEADROOM_HOST_DEVICE SumOfSquares sum() const {
    SumOfSquares sum;
    for (int i = 0; i < 3; ++i) sum.add({squares[i], 600 * (i - 1)});
    return sum;
  }
};

/// Where a rank stands: what has to be the same on all of them.
struct Standing {
  enum : int {
    kMessage,  // messages of this scaler so far
    kCall,     // step() or unscale_(), and of which optimizer
    kRound,    // updates so far
    kScale,    // that the gradients have
    kRules,    // policy, clipping, kind of gradients, replicated parameters: a fingerprint
    kState,    // all that the scaler remembers: a fingerprint
    kNorm,     // of replicated gradients, else 0
    kCount
  };
  double of[kCount] = {};
};

/// What goes over the wire.
struct Message {
  enum Sum { kCount, kInf, kNan, kNewInf, kNewZeros, kSquares, kSums = kSquares + 3 };
  // Counts once more, for ranks that all have the same gradients. The culprit's numbers all begin
  // with its rank, so that they come from one and the same. What has to be equal is sent as x and
  // -x: the largest of both tell the largest and the smallest x.
  enum Maximum {
    kMaxInf,
    kMaxNan,
    kMaxNewInf,
    kMaxNewZeros,
    kAmax,
    kCulprit,
    kCulpritInf,
    kCulpritNan,
    kList,
    kStanding = kList + 2,
    kMaxima = kStanding + 2 * Standing::kCount
  };
  double sums[kSums];
  double maxima[kMaxima];
};

/// The most ranks a culprit can be told from, and the most that is told of its counts.
inline constexpr int64_t kMaxRanks = int64_t{1} << 20;
inline constexpr int64_t kMaxTold = (int64_t{1} << 32) - 1;

/// The smaller rank gives the larger number, whatever the value.
HEADROOM_HOST_DEVICE inline double of_rank(int64_t rank, int64_t value) {
  const int64_t told = value < kMaxTold ? value : kMaxTold;
  return static_cast<double>((kMaxRanks - rank) * (kMaxTold + 1) + told);
}
HEADROOM_HOST_DEVICE inline int64_t rank_in(double number) {
  return kMaxRanks - static_cast<int64_t>(number) / (kMaxTold + 1);
}
HEADROOM_HOST_DEVICE inline int64_t value_in(double number) {
  return static_cast<int64_t>(number) % (kMaxTold + 1);
}

/// 52 bits that a double holds exactly. `seed` joins several.
HEADROOM_HOST_DEVICE inline double fingerprint(double seed, double value) {
  union {  // bit_cast, for devices too
    double number;
    uint64_t bits;
  } a{seed}, b{value};
  uint64_t mixed = (a.bits ^ (b.bits + 0x9E3779B97F4A7C15u + (a.bits << 6) + (a.bits >> 2)));
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((mixed ^ (mixed >> 31)) >> 12);
}

/// `list`: a fingerprint of the names and sizes of the rank's tensors, in their order.
HEADROOM_HOST_DEVICE inline Message pack(const Found& found, int rank, double list,
                                         const Standing& standing) {
  Message message{};
  double* const sums = message.sums;
  double* const maxima = message.maxima;
  sums[Message::kCount] = found.count;
  sums[Message::kInf] = maxima[Message::kMaxInf] = found.inf;
  sums[Message::kNan] = maxima[Message::kMaxNan] = found.nan;
  sums[Message::kNewInf] = maxima[Message::kMaxNewInf] = found.new_inf;
  sums[Message::kNewZeros] = maxima[Message::kMaxNewZeros] = found.new_zeros;
  for (int i = 0; i < 3; ++i) sums[Message::kSquares + i] = found.squares[i];
  maxima[Message::kAmax] = found.amax;
  if (found.culprit >= 0) {
    maxima[Message::kCulprit] = of_rank(rank, found.culprit);
    maxima[Message::kCulpritInf] = of_rank(rank, found.culprit_inf);
    maxima[Message::kCulpritNan] = of_rank(rank, found.culprit_nan);
  }
  maxima[Message::kList] = list;
  maxima[Message::kList + 1] = -list;
  for (int i = 0; i < Standing::kCount; ++i) {
    maxima[Message::kStanding + 2 * i] = standing.of[i];
    maxima[Message::kStanding + 2 * i + 1] = -standing.of[i];
  }
  return message;
}

HEADROOM_HOST_DEVICE inline bool equal_on_all(const double* pair) { return pair[0] == -pair[1]; }

/// The first standing in which the ranks differ, or Standing::kCount. Norms are compared only where
/// all gradients are finite.
HEADROOM_HOST_DEVICE inline int difference(const Message& all) {
  const bool finite = all.sums[Message::kInf] == 0.0 && all.sums[Message::kNan] == 0.0;
  for (int i = 0; i < Standing::kCount; ++i) {
    if (i == Standing::kNorm && !finite) continue;
    if (!equal_on_all(all.maxima + Message::kStanding + 2 * i)) return i;
  }
  return Standing::kCount;
}

/// What all ranks found. Replicated gradients are not added up: each rank has the whole.
HEADROOM_HOST_DEVICE inline Found unpack(const Message& all, bool replicated, const Found& mine) {
  Found found = mine;
  const double* const counts =
      replicated ? all.maxima + Message::kMaxInf : all.sums + Message::kInf;
  found.inf = counts[0];
  found.nan = counts[1];
  found.new_inf = counts[2];
  found.new_zeros = counts[3];
  if (!replicated) {
    found.count = all.sums[Message::kCount];
    for (int i = 0; i < 3; ++i) found.squares[i] = all.sums[Message::kSquares + i];
  }
  found.amax = all.maxima[Message::kAmax];
  const double culprit = all.maxima[Message::kCulprit];
  if (culprit > 0.0) {
    found.culprit_rank = rank_in(culprit);
    found.culprit = value_in(culprit);
    found.culprit_inf = value_in(all.maxima[Message::kCulpritInf]);
    found.culprit_nan = value_in(all.maxima[Message::kCulpritNan]);
  }
  return found;
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_AGREE_MESSAGE_H_
