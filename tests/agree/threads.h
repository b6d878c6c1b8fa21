// Ranks as threads of one process.
#ifndef HEADROOM_TESTS_AGREE_THREADS_H_
#define HEADROOM_TESTS_AGREE_THREADS_H_

#include <headroom/agree.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace headroom {

/// An all-reduce between threads: the last one to arrive wakes the others.
class ThreadAllReduce {
 public:
  ThreadAllReduce(int size, std::chrono::milliseconds limit) : size_(size), limit_(limit) {}
  int size() const { return size_; }
  int64_t reductions() const { return reductions_; }
  std::chrono::milliseconds limit() const { return limit_; }

  /// False if not all threads arrive within the limit.
  bool reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) {
    std::unique_lock lock(mutex_);
    if (arrived_ == 0) {
      sums_.assign(sums, sums + sum_count);
      maxima_.assign(maxima, maxima + maximum_count);
    } else {
      for (size_t i = 0; i < sum_count; ++i) sums_[i] += sums[i];
      for (size_t i = 0; i < maximum_count; ++i) maxima_[i] = std::max(maxima_[i], maxima[i]);
    }
    const int64_t previous = reductions_;
    if (++arrived_ == size_) {
      done_sums_ = sums_;
      done_maxima_ = maxima_;
      arrived_ = 0;
      ++reductions_;
      all_arrived_.notify_all();
    } else if (!all_arrived_.wait_for(lock, limit_, [&] { return reductions_ != previous; })) {
      return false;
    }
    std::copy(done_sums_.begin(), done_sums_.end(), sums);
    std::copy(done_maxima_.begin(), done_maxima_.end(), maxima);
    return true;
  }

 private:
  const int size_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable all_arrived_;
  int arrived_ = 0;
  int64_t reductions_ = 0;
  std::vector<double> sums_, maxima_, done_sums_, done_maxima_;
};

class ThreadRanks : public Ranks {
 public:
  ThreadRanks(std::shared_ptr<ThreadAllReduce> all_reduce, int rank)
      : all_reduce_(std::move(all_reduce)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return all_reduce_->size(); }
  void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) override {
    if (!all_reduce_->reduce(sums, sum_count, maxima, maximum_count)) {
      throw_did_not_come("within " + std::to_string(all_reduce_->limit().count()) + " ms");
    }
  }

 private:
  std::shared_ptr<ThreadAllReduce> all_reduce_;
  int rank_;
};

/// Runs `work` concurrently on every rank; returns the number of completed all-reduces.
inline int64_t run_on_ranks(int size, const std::function<void(std::shared_ptr<Ranks>)>& work,
                            std::chrono::milliseconds limit = std::chrono::seconds(60)) {
  const auto all_reduce = std::make_shared<ThreadAllReduce>(size, limit);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { work(std::make_shared<ThreadRanks>(all_reduce, rank)); });
  }
  for (std::thread& thread : threads) thread.join();
  return all_reduce->reductions();
}

}  // namespace headroom

#endif  // HEADROOM_TESTS_AGREE_THREADS_H_
