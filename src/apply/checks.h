// The checks that all lists of parameters go through.
#ifndef HEADROOM_SRC_APPLY_CHECKS_H_
#define HEADROOM_SRC_APPLY_CHECKS_H_

#include <headroom/tensor.h>

#include <vector>

namespace headroom::internal {

/// Throws if a weight or gradient cannot be used, if their sizes differ, or if memory is shared
/// between any two of them. Views that are the same as in `bound` at the same index are known to be
/// where they say, and CUDA is not asked again: frameworks rebind in every step.
void check_parameters(const std::vector<Parameter>& parameters,
                      const std::vector<Parameter>& bound = {});

/// Throws if an optimizer was moved from.
void check_whole(bool whole);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CHECKS_H_
