// layers: where each tensor's gradient lies in FP16's range, and which tensors bound the scale.
// Part of headroom::tools; Recorder::layers() writes it down.
#ifndef HEADROOM_LAYERS_H_
#define HEADROOM_LAYERS_H_

#include <headroom/export.h>
#include <headroom/measure.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Where the elements of a gradient, as they are in memory, lie in FP16's range. For gradients of
/// other types: where they would.
struct Fp16Zones {
  int64_t zero = 0;       // zero already: by nature, or because FP16 made it so
  int64_t lost = 0;       // not zero, but below 2^-25: FP16 makes it zero
  int64_t subnormal = 0;  // from 2^-25 to 2^-14: FP16 keeps only some of its digits
  int64_t normal = 0;
  int64_t overflow = 0;  // from 2^16 on, inf and nan

  /// Shares of the elements that are not zero already; 0 if there are none.
  HEADROOM_API double lost_share() const;
  HEADROOM_API double subnormal_share() const;
};

/// One tensor's gradient in a step that was looked at.
struct LayerStats {
  std::string name;
  GradStats stats;
  GradDetail detail;
};

HEADROOM_API Fp16Zones fp16_zones(const LayerStats& layer);

/// measure() with detail, tensor by tensor. Parameters without a gradient are left out. To be
/// called between backward and step(), which may clear the gradients.
HEADROOM_API std::vector<LayerStats> measure_layers(const std::vector<Parameter>& parameters);

/// Which tensors bound the scale from above and from below.
struct ScaleBounds {
  /// Index of the tensor that overflows FP16 first as the scale grows: one that has, or that with
  /// the largest element; -1 if all elements are zero.
  int64_t first_to_overflow = -1;
  /// How many times the scale can still be doubled before it does; may be a fraction, and negative
  /// if it has.
  double doublings_left = 0.0;

  /// Index of the tensor that loses most to FP16 at this scale: the largest share lost, then the
  /// largest share subnormal; -1 if no tensor has elements in either zone.
  int64_t first_to_underflow = -1;
  double lost = 0.0;  // its shares, see Fp16Zones
  double subnormal = 0.0;
};

HEADROOM_API ScaleBounds scale_bounds(const std::vector<LayerStats>& layers);

}  // namespace headroom

#endif  // HEADROOM_LAYERS_H_
