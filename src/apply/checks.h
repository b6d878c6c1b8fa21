// The checks that all lists of parameters go through.
#ifndef HEADROOM_SRC_APPLY_CHECKS_H_
#define HEADROOM_SRC_APPLY_CHECKS_H_

#include <headroom/tensor.h>

#include <vector>

namespace headroom::internal {

/// Throws if a weight or gradient cannot be used, if their sizes differ, or if memory is shared
/// between any two of them.
void check_parameters(const std::vector<Parameter>& parameters);

/// Throws if an optimizer was moved from.
void check_whole(bool whole);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CHECKS_H_
