// A job of several processes that train a small model together while faults are injected. The
// program that includes this header provides the transport.
#ifndef HEADROOM_TESTS_AGREE_JOB_H_
#define HEADROOM_TESTS_AGREE_JOB_H_

#include <headroom/headroom.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace headroom {

struct JobOptions {
  std::string mode;    // see Job
  std::string folder;  // each rank writes its result to <folder>/<rank>
  int64_t steps = 1000;
  std::chrono::milliseconds time_limit{60000};
};

inline JobOptions parse_job_options(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s MODE FOLDER STEPS MILLISECONDS\n", argv[0]);
    std::exit(2);
  }
  return {argv[1], argv[2], std::atoll(argv[3]), std::chrono::milliseconds(std::atoll(argv[4]))};
}

/// FNV-1a over bytes.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      value_ = (value_ ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001B3u;
    }
  }
  unsigned long long value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325u;
};

/// A non-finite gradient element on one rank, before or after the gradients are averaged.
enum class GradientFault { kNone, kBeforeAveraging, kAfterAveraging };

/// The fault of a step, the same on all ranks. job_test.py counts the same steps.
inline GradientFault gradient_fault(int64_t step) {
  if (step % 37 == 5) return GradientFault::kBeforeAveraging;
  return step % 53 == 7 ? GradientFault::kAfterAveraging : GradientFault::kNone;
}

/// Replaces each element by its sum over all ranks.
using AllReduceSum = std::function<void(float*, size_t)>;

/// One rank of the job. Modes:
///   replicated  gradients are averaged over the ranks; some steps have a gradient fault
///   sharded     each rank owns its tensors; some steps have a gradient fault
///   kill        rank 1 dies in the middle; `stop`: it hangs; `leave`: it exits early with code 0
///   drift       rank 1 computes a wrong gradient; `scale`: rank 1 changes its scale
class Job {
 public:
  Job(std::shared_ptr<Ranks> ranks, const JobOptions& options, AllReduceSum all_reduce_sum)
      : options_(options),
        all_reduce_sum_(std::move(all_reduce_sum)),
        rank_(ranks->rank()),
        size_(ranks->size()),
        sharded_(options.mode == "sharded"),
        scaler_(DynamicScale{.growth_interval = 10},
                {.ranks = ranks,
                 .gradients = sharded_ ? RankGradients::kSharded : RankGradients::kReplicated}),
        random_(static_cast<unsigned>(rank_) + 1u) {}

  /// Returns the exit code: 0, 1 for a failed check, 3 for a lost rank, 4 for ranks that differ.
  int run() {
    try {
      for (int64_t step = 0; step < options_.steps; ++step) {
        const bool fails_here = step == options_.steps / 2 && rank_ == 1;
        if (!train_step(step, fails_here)) return 0;
      }
    } catch (const Error& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank_, error.what());
      if (error.code() == ErrorCode::kRankLost) return 3;
      return error.code() == ErrorCode::kRanksDiffer ? 4 : 1;
    }
    return write_result() && wrong_ == 0 ? 0 : 1;
  }

 private:
  /// False if this rank leaves the job, between averaging and the scaler's step.
  bool train_step(int64_t step, bool fails_here) {
    const bool faulty = sharded_ || options_.mode == "replicated";
    const GradientFault fault = faulty ? gradient_fault(step) : GradientFault::kNone;
    const float scale = scaler_.scale(1.0f);
    backward(step, scale, fault);
    if (fails_here && options_.mode == "kill") std::raise(SIGKILL);
    if (fails_here && options_.mode == "stop") std::raise(SIGSTOP);
    if (fails_here && options_.mode == "leave") return false;
    if (fails_here && options_.mode == "drift") grads_[3] += 0.5f * scale;
    const StepReport report = scaler_.step(optimizer_, {.max_norm = 1.0f});
    scaler_.update();
    if (fails_here && options_.mode == "scale") scaler_.set_scale(scaler_.get_scale() * 2.0f);
    check(step, fault, report);
    const float next = scaler_.get_scale();
    results_.add(&next, sizeof(next));
    results_.add(&report.applied, sizeof(report.applied));
    if (report.applied) results_.add(&report.grad_norm, sizeof(report.grad_norm));
    return true;
  }

  void backward(int64_t step, float scale, GradientFault fault) {
    for (size_t i = 0; i < grads_.size(); ++i) {
      grads_[i] = scale * (0.1f * weights_[i] + noise_(random_));
    }
    const bool faulty_rank = step % size_ == rank_;
    const float bad = step % 2 == 0 ? HUGE_VALF : std::nanf("");
    const size_t position = static_cast<size_t>(step * 7) % grads_.size();
    if (fault == GradientFault::kBeforeAveraging && faulty_rank) grads_[position] = bad;
    if (!sharded_) {
      all_reduce_sum_(grads_.data(), grads_.size());
      for (float& grad : grads_) grad /= static_cast<float>(size_);
    }
    if (fault == GradientFault::kAfterAveraging && faulty_rank) grads_[position] = bad;
  }

  /// Averaging spreads a fault to all ranks; the culprit is then the lowest one.
  void check(int64_t step, GradientFault fault, const StepReport& report) {
    skipped_ += !report.applied;
    wrong_ += report.applied != (fault == GradientFault::kNone);
    const bool on_all_ranks = fault == GradientFault::kBeforeAveraging && !sharded_;
    const int culprit = on_all_ranks ? 0 : static_cast<int>(step % size_);
    if (!report.applied) wrong_ += report.stats.culprit_rank != culprit;
  }

  bool write_result() {
    if (!sharded_) results_.add(weights_.data(), weights_.size() * sizeof(float));
    std::FILE* const file =
        std::fopen((options_.folder + "/" + std::to_string(rank_)).c_str(), "w");
    if (file == nullptr) return false;
    std::fprintf(file, "%llx %lld %lld %a\n", results_.value(), static_cast<long long>(skipped_),
                 static_cast<long long>(wrong_), static_cast<double>(scaler_.get_scale()));
    return std::fclose(file) == 0;
  }

  static std::vector<float> initial_weights() {
    std::vector<float> weights(2 * kElements);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.01f * static_cast<float>(i);
    return weights;
  }

  static constexpr int64_t kElements = 100;
  JobOptions options_;
  AllReduceSum all_reduce_sum_;
  int rank_, size_;
  bool sharded_;
  std::vector<float> weights_ = initial_weights();
  std::vector<float> grads_ = std::vector<float>(2 * kElements);
  GradScaler scaler_;
  AdamW optimizer_{{{"a", view(weights_.data(), kElements), view(grads_.data(), kElements)},
                    {"b", view(weights_.data() + kElements, kElements),
                     view(grads_.data() + kElements, kElements)}},
                   {.lr = 0.01}};
  std::mt19937 random_;
  std::normal_distribution<float> noise_{0.0f, 0.1f};
  Hash results_;  // everything that must be the same on all ranks
  int64_t skipped_ = 0, wrong_ = 0;
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_AGREE_JOB_H_
