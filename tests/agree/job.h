// A job of several processes that trains a small model together, with faults on purpose. What
// connects the processes is the caller's.
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
  std::string mode;    // see run_job()
  std::string folder;  // each rank writes what it ended with to <folder>/<rank>
  int64_t steps = 1000;
  std::chrono::milliseconds time_limit{60000};
};

inline JobOptions job_options(int argc, char** argv) {
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

enum class Mishap { kNone, kBeforeAveraging, kAfterAveraging };

inline Mishap fault_in(int64_t step) {
  if (step % 37 == 5) return Mishap::kBeforeAveraging;
  return step % 53 == 7 ? Mishap::kAfterAveraging : Mishap::kNone;
}

/// Modes:
///   replicated  gradients are averaged, and some are bad on one rank, before or after that
///   sharded     each rank has tensors of its own, and some are bad on one rank
///   kill        rank 1 is gone in the middle; `stop`: it hangs; `leave`: it ends early, all right
///   drift       the gradients of rank 1 go astray; `scale`: its scale does
/// `add_up` makes each element the sum over all ranks. Returns the exit code: 0, 1 for a check that
/// failed, 3 for a rank that was lost, 4 for ranks that differ.
inline int run_job(std::shared_ptr<Ranks> ranks, const JobOptions& options,
                   const std::function<void(float*, size_t)>& add_up) {
  const int rank = ranks->rank();
  const int size = ranks->size();
  const bool sharded = options.mode == "sharded";
  const bool faulty = sharded || options.mode == "replicated";
  constexpr size_t kElements = 100;
  std::vector<float> weights(2 * kElements), grads(2 * kElements);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.01f * static_cast<float>(i);
  const auto half = static_cast<int64_t>(kElements);
  AdamW optimizer({{"a", view(weights.data(), half), view(grads.data(), half)},
                   {"b", view(weights.data() + half, half), view(grads.data() + half, half)}},
                  {.lr = 0.01});
  GradScaler scaler(DynamicScale{.growth_interval = 10},
                    {.ranks = ranks,
                     .gradients = sharded ? RankGradients::kSharded : RankGradients::kReplicated});
  std::mt19937 random(static_cast<unsigned>(rank) + 1u);
  std::normal_distribution<float> noise(0.0f, 0.1f);
  Hash told;  // what all ranks have to know alike
  int64_t skipped = 0, wrong = 0;
  try {
    for (int64_t step = 0; step < options.steps; ++step) {
      const bool chosen = step % size == rank;
      const bool middle = step == options.steps / 2 && rank == 1;
      const Mishap fault = faulty ? fault_in(step) : Mishap::kNone;
      const float scale = scaler.scale(1.0f);
      for (size_t i = 0; i < grads.size(); ++i) {
        grads[i] = scale * (0.1f * weights[i] + noise(random));
      }
      const float bad = step % 2 == 0 ? HUGE_VALF : std::nanf("");
      const size_t place = static_cast<size_t>(step * 7) % grads.size();
      if (fault == Mishap::kBeforeAveraging && chosen) grads[place] = bad;
      if (!sharded) {
        add_up(grads.data(), grads.size());
        for (float& grad : grads) grad /= static_cast<float>(size);
      }
      if (fault == Mishap::kAfterAveraging && chosen) grads[place] = bad;
      if (middle && options.mode == "kill") std::raise(SIGKILL);
      if (middle && options.mode == "stop") std::raise(SIGSTOP);
      if (middle && options.mode == "leave") return 0;
      if (middle && options.mode == "drift") grads[3] += 0.5f * scale;
      const StepReport report = scaler.step(optimizer, {.max_norm = 1.0f});
      scaler.update();
      if (middle && options.mode == "scale") scaler.set_scale(scaler.get_scale() * 2.0f);
      skipped += !report.applied;
      wrong += report.applied != (fault == Mishap::kNone);
      // After averaging all ranks have it, and the first one is named.
      const bool everywhere = fault == Mishap::kBeforeAveraging && !sharded;
      const int culprit = everywhere ? 0 : static_cast<int>(step % size);
      if (!report.applied) wrong += report.stats.culprit_rank != culprit;
      const float next = scaler.get_scale();
      told.add(&next, sizeof(next));
      told.add(&report.applied, sizeof(report.applied));
      if (report.applied) told.add(&report.grad_norm, sizeof(report.grad_norm));
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    if (error.code() == ErrorCode::kRankLost) return 3;
    return error.code() == ErrorCode::kRanksDiffer ? 4 : 1;
  }
  if (!sharded) told.add(weights.data(), weights.size() * sizeof(float));
  std::FILE* const file = std::fopen((options.folder + "/" + std::to_string(rank)).c_str(), "w");
  if (file == nullptr) return 1;
  std::fprintf(file, "%llx %lld %lld %a\n", told.value(), static_cast<long long>(skipped),
               static_cast<long long>(wrong), static_cast<double>(scaler.get_scale()));
  return std::fclose(file) == 0 && wrong == 0 ? 0 : 1;
}

}  // namespace headroom

#endif  // HEADROOM_TESTS_AGREE_JOB_H_
