// The range of the 16-bit or 32-bit format that a run computes in.
#ifndef HEADROOM_SRC_RECORD_FLOAT_RANGE_H_
#define HEADROOM_SRC_RECORD_FLOAT_RANGE_H_

#include <headroom/layers.h>

#include <string>
#include <utility>
#include <vector>

namespace headroom::internal {

/// Where the zones of a format begin, as exponents of two, and its largest finite number.
struct FloatRange {
  const char* name;
  int lost;      // below 2^lost a value becomes zero
  int normal;    // below 2^normal a value loses some of its bits
  int overflow;  // from 2^overflow on a value is inf
  double largest;
};

/// The format of the backward pass by the setting "precision": "fp16", "bf16", "fp32" (FP64, too),
/// or empty if the run does not state it. Reads the words of frameworks: "bf16-mixed", "float16".
std::string precision_of(const std::vector<std::pair<std::string, std::string>>& settings);

/// The range of that format; FP16 if there is no such setting, because scaling is for FP16.
const FloatRange& range_of(const std::vector<std::pair<std::string, std::string>>& settings);

/// fp16_zones() and scale_bounds() for a format.
Fp16Zones zones_in(const FloatRange& range, const LayerStats& layer);
ScaleBounds bounds_in(const FloatRange& range, const std::vector<LayerStats>& layers);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_FLOAT_RANGE_H_
