#include <headroom/layers.h>

#include <cmath>

namespace headroom {
namespace {

constexpr double kLargestF16 = 65504.0;

double share(int64_t part, const Fp16Zones& zones) {
  const int64_t all = zones.lost + zones.subnormal + zones.normal + zones.overflow;
  return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
}

}  // namespace

double Fp16Zones::lost_share() const { return share(lost, *this); }
double Fp16Zones::subnormal_share() const { return share(subnormal, *this); }

Fp16Zones fp16_zones(const GradStats& stats) {
  Fp16Zones zones;
  zones.zero = stats.detail.zeros;
  zones.overflow = stats.inf_count + stats.nan_count;
  int exponent = GradDetail::kMinExponent;
  for (const int64_t count : stats.detail.histogram) {
    (exponent < -25   ? zones.lost
     : exponent < -14 ? zones.subnormal
     : exponent < 16  ? zones.normal
                      : zones.overflow) += count;
    ++exponent;
  }
  return zones;
}

std::vector<LayerStats> measure_layers(const std::vector<Parameter>& parameters) {
  MeasureOptions options;
  options.detail = true;
  std::vector<LayerStats> layers;
  layers.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    if (parameter.grad.count == 0) continue;
    std::string name = parameter.name.empty() ? "gradient " + std::to_string(i) : parameter.name;
    layers.push_back({std::move(name), measure(std::vector<TensorView>{parameter.grad}, options)});
  }
  return layers;
}

ScaleBounds scale_bounds(const std::vector<LayerStats>& layers) {
  ScaleBounds bounds;
  double largest = 0.0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const GradStats& stats = layers[i].stats;
    // One that has inf or nan is over the edge, however small its finite elements are.
    const double top = stats.finite() ? stats.amax : HUGE_VAL;
    if (top > largest) {
      largest = top;
      bounds.first_to_overflow = static_cast<int64_t>(i);
    }
    const Fp16Zones zones = fp16_zones(stats);
    const double lost = zones.lost_share();
    const double subnormal = zones.subnormal_share();
    if (lost > bounds.lost || (lost == bounds.lost && subnormal > bounds.subnormal)) {
      bounds.first_to_underflow = static_cast<int64_t>(i);
      bounds.lost = lost;
      bounds.subnormal = subnormal;
    }
  }
  if (bounds.first_to_overflow >= 0) bounds.doublings_left = std::log2(kLargestF16 / largest);
  return bounds;
}

}  // namespace headroom
