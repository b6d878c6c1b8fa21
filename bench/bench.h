// The figures of `headroom bench`: each kernel beside its floor, measured in turns in one run.
#ifndef HEADROOM_BENCH_BENCH_H_
#define HEADROOM_BENCH_BENCH_H_

#include <cstddef>
#include <functional>
#include <string>

namespace headroom::bench {

struct Figure {
  std::string name;
  std::string floor;  // what it is compared with
  double gbps = 0.0;
  double floor_gbps = 0.0;

  double of_floor() const { return gbps / floor_gbps; }
};

struct Settings {
  std::string filter;       // only figures whose name contains this
  size_t megabytes = 1024;  // memory that one figure walks, far more than any cache holds
  int repetitions = 15;     // medians are taken over these
};

/// Runs the benchmarks one by one and calls `done` with each figure.
void run(const Settings& settings, const std::function<void(const Figure&)>& done);

}  // namespace headroom::bench

#endif  // HEADROOM_BENCH_BENCH_H_
