// A 16-bit weight that somebody else wrote to, and its master.
#ifndef HEADROOM_SRC_APPLY_FOLLOW_H_
#define HEADROOM_SRC_APPLY_FOLLOW_H_

#include <headroom/export.h>

#include <cstdint>
#include <cstring>

namespace headroom::internal {

/// Whether a weight is what its master was rounded to: to nearest, or (bf16) up or down at random.
HEADROOM_HOST_DEVICE inline bool came_from(float master, uint16_t weight, uint16_t nearest,
                                           bool at_random) {
  if (weight == nearest || !at_random) return weight == nearest;
  uint32_t bits = 0;
  memcpy(&bits, &master, sizeof bits);
  const uint32_t down = bits >> 16;
  return (bits & 0xffffu) != 0 && (weight == down || weight == down + 1);
}

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_FOLLOW_H_
