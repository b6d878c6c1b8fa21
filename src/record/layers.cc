#include <headroom/layers.h>

#include <cmath>

namespace headroom {
namespace {

// The largest finite FP16 number, 2^16 - 2^5.
constexpr double kLargestF16 = 65504.0;

// The share of the elements that are not zero.
double share(int64_t part, const Fp16Zones& zones) {
  const int64_t all = zones.lost + zones.subnormal + zones.normal + zones.overflow;
  return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
}

}  // namespace

double Fp16Zones::lost_share() const { return share(lost, *this); }
double Fp16Zones::subnormal_share() const { return share(subnormal, *this); }

Fp16Zones fp16_zones(const LayerStats& layer) {
  Fp16Zones zones;
  zones.zero = layer.detail.zeros;
  zones.overflow = layer.stats.inf_count + layer.stats.nan_count;
  int exponent = GradDetail::kMinExponent;
  for (const int64_t count : layer.detail.histogram) {  // of 2^exponent <= |x| < 2^(exponent + 1)
    (exponent < -25   ? zones.lost
     : exponent < -14 ? zones.subnormal
     : exponent < 16  ? zones.normal
                      : zones.overflow) += count;
    ++exponent;
  }
  return zones;
}

std::vector<LayerStats> measure_layers(const std::vector<Parameter>& parameters) {
  std::vector<LayerStats> layers;
  layers.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    if (parameter.grad.count == 0) continue;
    LayerStats& layer = layers.emplace_back();
    layer.name = parameter.name.empty() ? "gradient " + std::to_string(i) : parameter.name;
    layer.stats = measure(std::vector<TensorView>{parameter.grad}, &layer.detail);
  }
  return layers;
}

ScaleBounds scale_bounds(const std::vector<LayerStats>& layers) {
  ScaleBounds bounds;
  double largest = 0.0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const GradStats& stats = layers[i].stats;
    // A tensor with inf or nan has overflowed, however small its finite elements are.
    const double amax = stats.finite() ? stats.amax : HUGE_VAL;
    if (amax > largest) {
      largest = amax;
      bounds.first_to_overflow = static_cast<int64_t>(i);
    }
    // Lost elements weigh more than subnormal ones, which keep some of their bits.
    const Fp16Zones zones = fp16_zones(layers[i]);
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
