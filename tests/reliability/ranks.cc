// Faults of two ranks that train one model. The ranks are threads; tests/agree runs the same faults
// with processes over MPI and Gloo.
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/agree/threads.h"
#include "tests/reliability/faults.h"

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// kShort where a rank is expected not to arrive; kLong elsewhere, for busy machines.
constexpr std::chrono::milliseconds kShort{2000}, kLong{60000};

/// A rank with weights of 1 and SGD with a learning rate of 0.1.
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
    if (!averaging->reduce(sums.data(), sums.size(), &none, 1))
      throw BrokenPromise{"the other rank did not average"};
    for (size_t i = 0; i < g.size(); ++i) g[i] = static_cast<float>(sums[i] / 2);
  }
  void step() {
    report = scaler.step(optimizer);
    scaler.update();
  }
};

/// The state of a rank at its end.
struct RankResult {
  float weight = 0.0f, scale = 0.0f;
  std::string what;  // the error, or the report of the last step
  bool failed = false;
};

using RankFunction = std::function<void(int rank, Rank&)>;

struct RankOptions {
  hr::RankGradients gradients = hr::RankGradients::kReplicated;
  float scale_of_rank_1 = 65536.0f;
  std::chrono::milliseconds limit = kLong;
};

std::array<RankResult, 2> run_on_two_ranks(const RankFunction& work,
                                           const RankOptions& setting = {}) {
  hr::ThreadAllReduce averaging(2, setting.limit);
  std::array<RankResult, 2> ends;
  hr::run_on_ranks(
      2,
      [&](std::shared_ptr<hr::Ranks> ranks) {
        const int number = ranks->rank();
        Rank rank(ranks, &averaging, setting.gradients,
                  number == 1 ? setting.scale_of_rank_1 : 65536.0f);
        RankResult& end = ends[static_cast<size_t>(number)];
        try {
          work(number, rank);
          end.what = rank.report.to_string();
        } catch (const hr::Error& error) {
          end.what = error.what();
          end.failed = true;
        } catch (const BrokenPromise& failure) {  // of the averaging, which is not Headroom's
          end.what = failure.what;
        }
        end.weight = rank.w[0];
        end.scale = rank.scaler.get_scale();
      },
      setting.limit);
  return ends;
}

Outcome expect_both_skipped(const std::array<RankResult, 2>& ends) {
  for (const RankResult& end : ends) {
    expect(end.weight == 1.0f && end.scale == 32768.0f && end.what == ends[0].what,
           "the ranks diverge");
  }
  return {"reported", "on both: " + ends[0].what};
}

// At least `ranks` of the two ranks threw an error, and the weights are those before it.
Outcome expect_errors(const std::array<RankResult, 2>& ends, int ranks, float weight) {
  int failed = 0;
  for (const RankResult& end : ends) failed += end.failed;
  expect(failed >= ranks, "a rank did not get the error");
  expect(std::fabs(ends[0].weight - weight) < 1e-6f, "a weight was changed");
  return {"reported", ends[0].what.substr(0, ends[0].what.find(". "))};
}

}  // namespace

Outcome rank_overflows_before_averaging() {
  return expect_both_skipped(run_on_two_ranks([](int rank, Rank& one) {
    one.backward(rank == 1 ? kInf : 1.0f);
    one.average();
    one.step();
  }));
}

Outcome rank_overflows_after_averaging() {
  return expect_both_skipped(run_on_two_ranks([](int rank, Rank& one) {
    one.backward(1.0f);
    one.average();
    if (rank == 1) one.g[0] = kInf;
    one.step();
  }));
}

Outcome rank_overflows_in_its_shard() {
  return expect_both_skipped(run_on_two_ranks(
      [](int rank, Rank& one) {
        one.backward(rank == 1 ? kInf : 1.0f);
        one.step();
      },
      {.gradients = hr::RankGradients::kSharded}));
}

Outcome rank_without_gradients() {
  const auto ends = run_on_two_ranks(
      [](int rank, Rank& one) {
        if (rank == 1) one.optimizer.set_grad(0, {});
        one.backward(1.0f);
        one.step();
      },
      {.gradients = hr::RankGradients::kSharded});
  expect(ends[0].weight == 0.9f && ends[1].weight == 1.0f && !ends[1].failed, "wrong weights");
  return {"fine", "it participates"};
}

Outcome rank_dies() {
  const auto ends = run_on_two_ranks(
      [](int rank, Rank& one) {
        for (int i = 0; i < 4; ++i) {
          one.backward(1.0f);
          one.average();
          if (rank == 1 && i == 2) return;
          one.step();
        }
      },
      {.limit = kShort});
  return expect_errors(ends, 1, 0.8f);
}

Outcome rank_omits_a_step() {
  const auto ends = run_on_two_ranks(
      [](int rank, Rank& one) {
        for (int i = 0; i < 4; ++i) {
          one.backward(1.0f);
          one.average();
          if (rank == 0 || i != 2) one.step();
        }
      },
      {.limit = kShort});
  return expect_errors(ends, 1, 0.8f);
}

Outcome rank_has_one_batch_less() {
  const auto ends = run_on_two_ranks(
      [](int rank, Rank& one) {
        for (int i = 0; i < 4 - rank; ++i) {
          one.backward(1.0f);
          one.step();
        }
      },
      {.limit = kShort});
  return expect_errors(ends, 1, 0.7f);
}

Outcome ranks_start_with_different_scales() {
  const auto ends = run_on_two_ranks(
      [](int, Rank& one) {
        one.backward(1.0f);
        one.average();
        one.step();
      },
      {.scale_of_rank_1 = 16384.0f});
  return expect_errors(ends, 2, 1.0f);
}
