// The ticks of plots.
#ifndef HEADROOM_CLI_TRAIN_TICKS_H_
#define HEADROOM_CLI_TRAIN_TICKS_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace headroom::cli {

/// A distance of 1, 2 or 5 times a power of ten that puts about `wish` ticks on `span`.
inline double round_spacing(double span, double wish) {
  const double base = std::pow(10.0, std::floor(std::log10(span / wish)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * base >= 0.999 * span / wish) return factor * base;
  }
  return 10.0 * base;
}

/// The ticks between two positive values on a logarithmic axis, with their texts: powers of `base`,
/// 2 or 10, or round values if there are fewer than two powers of ten.
inline std::vector<std::pair<double, std::string>> log_ticks(double low, double high, int base) {
  std::vector<std::pair<double, std::string>> ticks;
  const double unit = std::log(base);
  const auto first = static_cast<int>(std::ceil(std::log(low) / unit));
  const auto last = static_cast<int>(std::floor(std::log(high) / unit));
  if (last > first || base == 2) {
    const int apart = std::max(1, (last - first) / 6);
    for (int k = first; k <= last; k += apart) {
      ticks.emplace_back(std::pow(base, k), (base == 2 ? "2^" : "1e") + std::to_string(k));
    }
    return ticks;
  }
  const double apart = round_spacing(high - low, 5.0);
  for (double k = std::ceil(low / apart); k * apart <= high; k += 1.0) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", k * apart);
    ticks.emplace_back(k * apart, text);
  }
  return ticks;
}

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_TICKS_H_
