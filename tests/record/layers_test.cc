#include <gtest/gtest.h>
#include <headroom/record.h>

#include <cmath>
#include <limits>

namespace headroom {
namespace {

LayerStats make_layer(const std::string& name, const std::vector<float>& values) {
  LayerStats layer{name, {}, {}};
  layer.stats = measure(std::vector<TensorView>{view(values)}, &layer.detail);
  return layer;
}

TEST(Layers, ZonesAreTheRangesOfFp16) {
  const float inf = std::numeric_limits<float>::infinity();
  const Fp16Zones zones =
      fp16_zones(make_layer("w", {0.0f, 0x1p-26f, -0x1.8p-26f, 0x1.1p-25f, 0x1.8p-15f, 0x1p-14f,
                                  1.0f, 65504.0f, 0x1p16f, -inf, NAN}));
  EXPECT_EQ(zones.zero, 1);
  EXPECT_EQ(zones.lost, 2);
  EXPECT_EQ(zones.subnormal, 2);
  EXPECT_EQ(zones.normal, 3);
  EXPECT_EQ(zones.overflow, 3);
  EXPECT_DOUBLE_EQ(zones.lost_share(), 0.2);
  EXPECT_DOUBLE_EQ(zones.subnormal_share(), 0.2);
}

// Compares the zones with the conversion itself, for every exponent of a float.
TEST(Layers, LostElementsAreThoseThatConversionFlushes) {
  for (int exponent = -149; exponent <= 127; ++exponent) {
    const float value = std::ldexp(1.25f, exponent);
    const float stored = static_cast<float>(f16(value));
    const Fp16Zones zones = fp16_zones(make_layer("w", {value}));
    EXPECT_EQ(zones.lost == 1, stored == 0.0f) << exponent;
    EXPECT_EQ(zones.overflow == 1, std::isinf(stored)) << exponent;
  }
}

TEST(Layers, FirstToOverflowHasTheLargestElement) {
  const ScaleBounds bounds = scale_bounds(
      {make_layer("a", {1.0f, 2.0f}), make_layer("b", {-8188.0f}), make_layer("c", {0.0f})});
  EXPECT_EQ(bounds.first_to_overflow, 1);
  EXPECT_DOUBLE_EQ(bounds.doublings_left, 3.0);  // 8188 x 8 = 65504
  EXPECT_EQ(bounds.first_to_underflow, -1);
}

TEST(Layers, OverflowedLayerIsFirstToOverflow) {
  const float inf = std::numeric_limits<float>::infinity();
  const ScaleBounds bounds =
      scale_bounds({make_layer("a", {60000.0f}), make_layer("b", {inf, 1.0f})});
  EXPECT_EQ(bounds.first_to_overflow, 1);
  EXPECT_LT(bounds.doublings_left, 0.0);
}

TEST(Layers, FirstToUnderflowIsOrderedByLostThenSubnormalShare) {
  const std::vector<LayerStats> layers = {
      make_layer("subnormal", {0x1p-20f, 0x1p-20f}),
      make_layer("lost", {0x1p-30f, 1.0f, 1.0f, 1.0f}),
      make_layer("zeros are not counted", {0.0f, 0.0f, 0.0f, 1.0f})};
  EXPECT_EQ(scale_bounds(layers).first_to_underflow, 1);
  EXPECT_DOUBLE_EQ(scale_bounds(layers).lost, 0.25);
  EXPECT_EQ(scale_bounds({layers[2], layers[0]}).first_to_underflow, 1);
  EXPECT_EQ(scale_bounds({layers[2]}).first_to_underflow, -1);
  EXPECT_EQ(scale_bounds({}).first_to_overflow, -1);
}

TEST(Layers, ParametersWithoutGradientsAreOmittedAndUnnamedOnesNumbered) {
  std::vector<float> grad = {1.0f};
  const auto layers =
      measure_layers({{"none", {}, {}}, {"", {}, view(grad)}, {"w", {}, view(grad)}});
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0].name, "gradient 1");
  EXPECT_EQ(layers[1].name, "w");
}

}  // namespace
}  // namespace headroom
