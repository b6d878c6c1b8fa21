// Checks that every list of parameters has to pass.
#ifndef HEADROOM_SRC_APPLY_CHECKS_H_
#define HEADROOM_SRC_APPLY_CHECKS_H_

#include <headroom/tensor.h>

#include <array>
#include <vector>

namespace headroom::internal {

/// An array of a parameter, with its name for error messages.
struct NamedView {
  const char* name;
  const TensorView* view;
};

/// All arrays that belong to a parameter; those that it does not have are empty views.
inline std::array<NamedView, 5> arrays_of(const Parameter& p) {
  return {{{"weight", &p.weight},
           {"gradient", &p.grad},
           {"master", &p.master},
           {"moment", &p.first_moment},
           {"moment", &p.second_moment}}};
}

/// Throws if an array cannot be used, if sizes or devices of one parameter differ, or if any two
/// arrays share memory. The location of views that are the same as in `bound` at the same index is
/// not checked again: frameworks rebind in every step.
void check_parameters(const std::vector<Parameter>& parameters,
                      const std::vector<Parameter>& bound = {});

/// Throws Error(kInvalidArgument) unless the optimizer still has its state.
void check_not_moved_from(bool has_state);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_APPLY_CHECKS_H_
