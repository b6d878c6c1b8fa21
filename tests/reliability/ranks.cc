// What can happen where two ranks train one model. They are threads here; tests/agree does the same
// with processes over MPI and Gloo.
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/agree/threads.h"
#include "tests/reliability/faults.h"

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// Where a rank does not come; elsewhere a busy machine has time.
constexpr std::chrono::milliseconds kShort{2000}, kLong{60000};

/// A rank with a weight of 1 under SGD with a rate of 0.1.
struct Rank {
  std::vector<float> w = std::vector<float>(4, 1.0f), g = std::vector<float>(4, 0.0f);
  hr::SGD optimizer{{{"w", hr::view(w), hr::view(g)}}, {.lr = 0.1}};
  hr::ThreadAllReduce* averaging;
  hr::GradScaler scaler;
  hr::StepReport report;

  Rank(std::shared_ptr<hr::Ranks> ranks, hr::ThreadAllReduce* meeting, hr::RankGradients gradients,
       float scale)
      : averaging(meeting),
        scaler(hr::DynamicScale{.init_scale = scale}, {.ranks = ranks, .gradients = gradients}) {}

  void backward(float grad) { g.assign(4, scaler.scale(1.0f) * grad); }
  void average() {
    std::vector<double> sums(g.begin(), g.end());
    double none = 0.0;
    if (!averaging->reduce(sums.data(), sums.size(), &none, 1)) throw Harm{"nobody came"};
    for (size_t i = 0; i < g.size(); ++i) g[i] = static_cast<float>(sums[i] / 2);
  }
  void step() {
    report = scaler.step(optimizer);
    scaler.update();
  }
};

/// How a rank ended.
struct End {
  float weight = 0.0f, scale = 0.0f;
  std::string what;  // of the error, or of the last step
  bool failed = false;
};

using Work = std::function<void(int rank, Rank&)>;

struct Setting {
  hr::RankGradients gradients = hr::RankGradients::kReplicated;
  float scale_of_rank_1 = 65536.0f;
  std::chrono::milliseconds limit = kLong;
};

std::array<End, 2> on_two_ranks(const Work& work, const Setting& setting = {}) {
  hr::ThreadAllReduce averaging(2, setting.limit);
  std::array<End, 2> ends;
  hr::run_on_ranks(
      2,
      [&](std::shared_ptr<hr::Ranks> ranks) {
        const int number = ranks->rank();
        Rank rank(ranks, &averaging, setting.gradients,
                  number == 1 ? setting.scale_of_rank_1 : 65536.0f);
        End& end = ends[static_cast<size_t>(number)];
        try {
          work(number, rank);
          end.what = rank.report.to_string();
        } catch (const hr::Error& error) {
          end.what = error.what();
          end.failed = true;
        } catch (const Harm& harm) {  // the averaging, which is not Headroom's
          end.what = harm.what;
        }
        end.weight = rank.w[0];
        end.scale = rank.scaler.get_scale();
      },
      setting.limit);
  return ends;
}

Outcome both_skipped(const std::array<End, 2>& ends) {
  for (const End& end : ends) {
    expect(end.weight == 1.0f && end.scale == 32768.0f && end.what == ends[0].what,
           "the ranks part");
  }
  return {"reported", "on both: " + ends[0].what};
}

// `ranks` of the two have an error, and weights are what they were before it.
Outcome told(const std::array<End, 2>& ends, int ranks, float weight) {
  int failed = 0;
  for (const End& end : ends) failed += end.failed;
  expect(failed >= ranks, "a rank was not told");
  expect(std::fabs(ends[0].weight - weight) < 1e-6f, "a weight was changed");
  return {"reported", ends[0].what.substr(0, ends[0].what.find(". "))};
}

}  // namespace

Outcome rank_overflows_before_averaging() {
  return both_skipped(on_two_ranks([](int rank, Rank& one) {
    one.backward(rank == 1 ? kInf : 1.0f);
    one.average();
    one.step();
  }));
}

Outcome rank_overflows_after_averaging() {
  return both_skipped(on_two_ranks([](int rank, Rank& one) {
    one.backward(1.0f);
    one.average();
    if (rank == 1) one.g[0] = kInf;
    one.step();
  }));
}

Outcome rank_overflows_in_its_shard() {
  return both_skipped(on_two_ranks(
      [](int rank, Rank& one) {
        one.backward(rank == 1 ? kInf : 1.0f);
        one.step();
      },
      {.gradients = hr::RankGradients::kSharded}));
}

Outcome rank_without_gradients() {
  const auto ends = on_two_ranks(
      [](int rank, Rank& one) {
        if (rank == 1) one.optimizer.set_grad(0, {});
        one.backward(1.0f);
        one.step();
      },
      {.gradients = hr::RankGradients::kSharded});
  expect(ends[0].weight == 0.9f && ends[1].weight == 1.0f && !ends[1].failed, "it does not work");
  return {"fine", "it takes part"};
}

Outcome rank_dies() {
  const auto ends = on_two_ranks(
      [](int rank, Rank& one) {
        for (int i = 0; i < 4; ++i) {
          one.backward(1.0f);
          one.average();
          if (rank == 1 && i == 2) return;
          one.step();
        }
      },
      {.limit = kShort});
  return told(ends, 1, 0.8f);
}

Outcome rank_leaves_out_a_step() {
  const auto ends = on_two_ranks(
      [](int rank, Rank& one) {
        for (int i = 0; i < 4; ++i) {
          one.backward(1.0f);
          one.average();
          if (rank == 0 || i != 2) one.step();
        }
      },
      {.limit = kShort});
  return told(ends, 1, 0.8f);
}

Outcome rank_has_a_batch_less() {
  const auto ends = on_two_ranks(
      [](int rank, Rank& one) {
        for (int i = 0; i < 4 - rank; ++i) {
          one.backward(1.0f);
          one.step();
        }
      },
      {.limit = kShort});
  return told(ends, 1, 0.7f);
}

Outcome ranks_begin_with_different_scales() {
  const auto ends = on_two_ranks(
      [](int, Rank& one) {
        one.backward(1.0f);
        one.average();
        one.step();
      },
      {.scale_of_rank_1 = 16384.0f});
  return told(ends, 2, 1.0f);
}
