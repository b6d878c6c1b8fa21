// Structs that cross the border: the sizes that tell their version, and their C++ counterparts.
#ifndef HEADROOM_ADAPTERS_C_STRUCTS_H_
#define HEADROOM_ADAPTERS_C_STRUCTS_H_

#include <headroom/c.h>
#include <headroom/measure.h>
#include <headroom/scaler.h>

#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "adapters/c/errors.h"

namespace headroom::c {

/// The size of a struct in the first version that had it. When members are added it becomes a
/// number, and every caller compiled since then is still served.
template <typename Struct>
inline constexpr size_t kFirstSize = sizeof(Struct);

/// Throws Failure(HR_ERROR_VERSION) unless a struct of this size can be read and written.
template <typename Struct>
void check_size(size_t size, const char* name) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  if (size >= kFirstSize<Struct> && size <= sizeof(Struct)) return;
  throw Failure{HR_ERROR_VERSION, "'" + std::string(name) + "' says it has " +
                                      std::to_string(size) + " bytes, and this library (" +
                                      HEADROOM_VERSION + ") knows it with " +
                                      std::to_string(sizeof(Struct)) +
                                      "; set its size to sizeof, or install the library that "
                                      "belongs to the header."};
}

/// The caller's struct; members that it does not have yet are those of `defaults`.
template <typename Struct>
Struct taken(const Struct* from, Struct defaults, const char* name) {
  if (from == nullptr) return defaults;
  check_size<Struct>(from->size, name);
  std::memcpy(&defaults, from, from->size);
  return defaults;
}

/// Fills as much of the caller's struct as it has. Its size was checked before.
template <typename Struct>
void give(const Struct& value, Struct* to, size_t size) {
  std::memcpy(to, &value, size);
  to->size = size;
}

/// Fills it, unless it is null.
template <typename Struct>
void give(const Struct& value, Struct* to) {
  if (to != nullptr) give(value, to, to->size);
}

/// Checks a struct that will be filled, before anything happens. Null is nothing to fill.
template <typename Struct>
void check_to_fill(const Struct* to, const char* name) {
  if (to != nullptr) check_size<Struct>(to->size, name);
}

/// The element, if there is one.
template <typename T>
const T& at(const std::vector<T>& list, size_t index, const char* what) {
  if (index < list.size()) return list[index];
  throw Failure{HR_ERROR_INVALID_ARGUMENT, "the index is " + std::to_string(index) +
                                               ", but there are " + std::to_string(list.size()) +
                                               " " + what + "; count from 0."};
}

Device device_from(int32_t type, int32_t index);
TensorView view_from(const hr_tensor& tensor);
hr_tensor tensor_from(const TensorView& view);
std::vector<TensorView> views_from(const hr_tensor* tensors, size_t count);
std::vector<Parameter> parameters_from(const hr_parameter* parameters, size_t count);
hr_parameter parameter_from(const Parameter& parameter);

StepOptions step_options_from(const hr_step_options* options);
hr_report report_from(const StepReport& report);
hr_stats stats_from(const GradStats& stats, const GradDetail& detail);
hr_unscale_result unscale_result_from(const GradStats& result);

}  // namespace headroom::c

#endif  // HEADROOM_ADAPTERS_C_STRUCTS_H_
