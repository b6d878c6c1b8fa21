// The benchmarks of `headroom bench`: the speed of each kernel and of its floor, measured in
// alternation in one run.
#ifndef HEADROOM_BENCH_BENCH_H_
#define HEADROOM_BENCH_BENCH_H_

#include <cstddef>
#include <functional>
#include <string>

namespace headroom::bench {

struct Figure {
  std::string name;
  std::string floor;  // describes the work it is compared with
  double gbps = 0.0;
  double floor_gbps = 0.0;

  double of_floor() const { return gbps / floor_gbps; }
};

struct Settings {
  std::string filter;       // runs only figures whose name contains this
  size_t megabytes = 1024;  // memory that a figure reads and writes, far more than any cache
  int repetitions = 15;     // number of timings of which the median is reported
};

/// Runs the benchmarks one by one and calls `done` with each figure.
void run(const Settings& settings, const std::function<void(const Figure&)>& done);

}  // namespace headroom::bench

#endif  // HEADROOM_BENCH_BENCH_H_
