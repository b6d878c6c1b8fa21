// A history that is written step by step, for the rules to judge.
#ifndef HEADROOM_TESTS_DIAGNOSE_RECORDED_H_
#define HEADROOM_TESTS_DIAGNOSE_RECORDED_H_

#include <headroom/diagnose.h>
#include <headroom/record.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/record/folder.h"

namespace headroom {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Writes a history step by step.
class Recorded {
 public:
  explicit Recorded(const std::string& policy, const std::string& precision = "fp16",
                    bool resume = false, const Folder* folder = nullptr)
      : own_(folder == nullptr ? std::make_unique<Folder>() : nullptr),
        folder_(folder == nullptr ? *own_ : *folder) {
    RunInfo info;
    info.policy = parse_policy(policy);
    if (!precision.empty()) info.settings = {{"precision", precision}};
    info.resume = resume;
    recorder_.emplace(folder_.path("run"), info);
  }

  /// Steps whose largest scaled gradient is `largest`.
  Recorded& steps(int count, double scale, double largest = 16384.0, double loss = 1.0) {
    for (int i = 0; i < count; ++i) {
      StepReport report;
      report.applied = true;
      report.scale = static_cast<float>(scale);
      report.grad_norm = largest / scale;
      report.stats.amax = largest;
      report.stats.squares[1] = largest * largest;
      recorder_->step(++step_, loss, report);
    }
    return *this;
  }
  Recorded& skip(double scale, int64_t infs = 1, int64_t nans = 0, double loss = 1.0) {
    StepReport report;
    report.scale = static_cast<float>(scale);
    report.skip = Skip::kNotFinite;
    report.stats.inf_count = infs;
    report.stats.nan_count = nans;
    report.culprit = "w: bad";
    recorder_->step(++step_, loss, report);
    return *this;
  }
  /// A record of layers, of which a share is subnormal and the rest `largest`.
  Recorded& layers(double subnormal, double largest = 16384.0, double other = 0.0,
                   const std::string& name = "block.top.weight") {
    LayerStats layer;
    layer.name = name;
    layer.stats.count = 1000;
    layer.stats.amax = largest;
    fill(subnormal, largest, &layer);
    std::vector<LayerStats> all = {layer};
    if (other > 0.0) {
      all.push_back(layer);
      all[1].name = "block.other.weight";
      all[1].stats.amax = other;
      fill(subnormal, other, &all[1]);
    }
    layers_step_ = std::max(layers_step_ + 1, step_);
    recorder_->layers(layers_step_, 1.0, all);
    return *this;
  }
  Recorded& rewind(int64_t step) {
    recorder_->rewind(step);
    step_ = step;
    return *this;
  }
  Diagnosis diagnosis() const { return diagnose(folder_.path("run")).at(0); }
  /// The ids of the findings, the most important first.
  std::string found() const {
    std::string ids;
    for (const Finding& finding : diagnosis().findings)
      ids += (ids.empty() ? "" : " ") + finding.rule;
    return ids;
  }

 private:
  static void fill(double subnormal, double largest, LayerStats* layer) {
    layer->detail.histogram = {};
    const auto bin = [&](int exponent) -> int64_t& {
      return layer->detail.histogram[static_cast<size_t>(exponent - GradDetail::kMinExponent)];
    };
    const auto small = static_cast<int64_t>(std::lround(1000.0 * subnormal));
    bin(-20) += small;
    bin(std::ilogb(largest)) += 1000 - small;
  }

  std::unique_ptr<Folder> own_;
  const Folder& folder_;
  std::optional<Recorder> recorder_;
  int64_t step_ = 0;
  int64_t layers_step_ = 0;
};

}  // namespace headroom

#endif  // HEADROOM_TESTS_DIAGNOSE_RECORDED_H_
