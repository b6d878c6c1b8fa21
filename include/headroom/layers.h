// layers: where the gradient of each tensor lies in FP16's range, and which tensors limit the
// scale. Part of headroom::tools; Recorder::layers() records it.
#ifndef HEADROOM_LAYERS_H_
#define HEADROOM_LAYERS_H_

#include <headroom/export.h>
#include <headroom/measure.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Where the elements of a gradient in memory lie in FP16's range, or would lie for gradients of
/// other types.
struct Fp16Zones {
  int64_t zero = 0;       // already zero, possibly by underflow
  int64_t lost = 0;       // not zero, but below 2^-25: becomes zero in FP16
  int64_t subnormal = 0;  // from 2^-25 to 2^-14: loses some of its bits in FP16
  int64_t normal = 0;
  int64_t overflow = 0;  // from 2^16 on, inf and nan

  /// Shares of the nonzero elements; 0 if there are none.
  HEADROOM_API double lost_share() const;
  HEADROOM_API double subnormal_share() const;
};

/// The statistics of one tensor's gradient in one step.
struct LayerStats {
  std::string name;
  GradStats stats;
  GradDetail detail;
};

/// Where the gradients of a layer lie in FP16's range.
HEADROOM_API Fp16Zones fp16_zones(const LayerStats& layer);

/// measure() with detail for each tensor. Parameters without a gradient are omitted. Call it
/// between backward and step(), which may clear the gradients.
HEADROOM_API std::vector<LayerStats> measure_layers(const std::vector<Parameter>& parameters);

/// The tensors that limit the scale from above and from below.
struct ScaleBounds {
  /// Index of the tensor that overflows FP16 first as the scale grows: one that has overflowed, or
  /// the one with the largest element; -1 if all elements are zero.
  int64_t first_to_overflow = -1;
  /// How often the scale can be doubled until then; may be a fraction, and is negative if the
  /// tensor has overflowed.
  double doublings_left = 0.0;

  /// Index of the tensor that loses most in FP16 at this scale: the largest lost share, then the
  /// largest subnormal share; -1 if no tensor has elements in either zone.
  int64_t first_to_underflow = -1;
  double lost = 0.0;  // its shares, see Fp16Zones
  double subnormal = 0.0;
};

/// Which layers bound the scale from above and below.
HEADROOM_API ScaleBounds scale_bounds(const std::vector<LayerStats>& layers);

}  // namespace headroom

#endif  // HEADROOM_LAYERS_H_
