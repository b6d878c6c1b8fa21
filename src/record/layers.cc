#include <headroom/layers.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "record/float_range.h"

namespace headroom {
namespace {

using internal::FloatRange;

// Below half of its smallest subnormal, a format rounds to zero.
constexpr FloatRange kFP16 = {"FP16", -25, -14, 16, 65504.0};
constexpr FloatRange kBF16 = {"BF16", -134, -126, 128, 0x1.FEp127};
constexpr FloatRange kFP32 = {"FP32", -150, -126, 128, 0x1.FFFFFEp127};

// The share of the elements that are not zero.
double share(int64_t part, const Fp16Zones& zones) {
  const int64_t all = zones.lost + zones.subnormal + zones.normal + zones.overflow;
  return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
}

}  // namespace

double Fp16Zones::lost_share() const { return share(lost, *this); }
double Fp16Zones::subnormal_share() const { return share(subnormal, *this); }

namespace internal {

std::string precision_of(const std::vector<std::pair<std::string, std::string>>& settings) {
  const auto found = std::find_if(settings.begin(), settings.end(),
                                  [](const auto& item) { return item.first == "precision"; });
  if (found == settings.end()) return "";
  std::string text = found->second;
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return c < 0x80 ? std::tolower(c) : c; });
  const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
  if (has("bf16") || has("bfloat16")) return "bf16";
  if (has("16")) return "fp16";
  return has("32") || has("64") ? "fp32" : "";
}

const FloatRange& range_of(const std::vector<std::pair<std::string, std::string>>& settings) {
  const std::string precision = precision_of(settings);
  return precision == "bf16" ? kBF16 : precision == "fp32" ? kFP32 : kFP16;
}

Fp16Zones zones_in(const FloatRange& range, const LayerStats& layer) {
  Fp16Zones zones;
  zones.zero = layer.detail.zeros;
  zones.overflow = layer.stats.inf_count + layer.stats.nan_count;
  int exponent = GradDetail::kMinExponent;
  for (const int64_t count : layer.detail.histogram) {  // of 2^exponent <= |x| < 2^(exponent + 1)
    (exponent < range.lost       ? zones.lost
     : exponent < range.normal   ? zones.subnormal
     : exponent < range.overflow ? zones.normal
                                 : zones.overflow) += count;
    ++exponent;
  }
  return zones;
}

ScaleBounds bounds_in(const FloatRange& range, const std::vector<LayerStats>& layers) {
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
    const Fp16Zones zones = zones_in(range, layers[i]);
    const double lost = zones.lost_share();
    const double subnormal = zones.subnormal_share();
    if (lost > bounds.lost || (lost == bounds.lost && subnormal > bounds.subnormal)) {
      bounds.first_to_underflow = static_cast<int64_t>(i);
      bounds.lost = lost;
      bounds.subnormal = subnormal;
    }
  }
  if (bounds.first_to_overflow >= 0) bounds.doublings_left = std::log2(range.largest / largest);
  return bounds;
}

}  // namespace internal

Fp16Zones fp16_zones(const LayerStats& layer) { return internal::zones_in(kFP16, layer); }

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
  return internal::bounds_in(kFP16, layers);
}

}  // namespace headroom
