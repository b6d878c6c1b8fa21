// Conversion between the structs of the C API and the C++ types, and the `size` members that give
// a struct's version.
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

/// The size of a struct in the first version that had it. Specialize this with a number when
/// members are added, so that programs compiled before then keep working.
template <typename Struct>
inline constexpr size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr size_t kFirstSize<hr_precision> = 24;

/// Throws Failure(HR_ERROR_VERSION) unless a struct of this size can be read and written.
template <typename Struct>
void check_size(size_t size, const char* name) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  if (size == kFirstSize<Struct> || size == sizeof(Struct)) return;
  throw Failure{HR_ERROR_VERSION, "'" + std::string(name) + "' has size " + std::to_string(size) +
                                      ", and this library (" + HEADROOM_VERSION + ") expects " +
                                      std::to_string(sizeof(Struct)) +
                                      "; set its size to sizeof, or install the library of the "
                                      "header that the program was compiled with."};
}

/// A copy of the caller's struct. Members that the caller's version lacks, or all of them if `from`
/// is null, have the values of `defaults`.
template <typename Struct>
Struct read_struct(const Struct* from, Struct defaults, const char* name) {
  if (from == nullptr) return defaults;
  check_size<Struct>(from->size, name);
  std::memcpy(&defaults, from, from->size);
  return defaults;
}

/// Checks a struct that write_struct() will fill, before the call has any effect. `to` may be null.
template <typename Struct>
void check_output(const Struct* to, const char* name) {
  if (to != nullptr) check_size<Struct>(to->size, name);
}

/// Writes the members that the caller's version has, unless `to` is null. Its size is valid.
template <typename Struct>
void write_struct(const Struct& value, Struct* to) {
  if (to == nullptr) return;
  const size_t size = to->size;
  std::memcpy(to, &value, size);
  to->size = size;
}

/// The body of the init functions: fills an uninitialized struct of `size` bytes.
template <typename Struct>
void init_struct(Struct* to, size_t size, const Struct& defaults, const char* name) {
  check_size<Struct>(size, name);
  require(to, name)->size = size;
  write_struct(defaults, to);
}

/// list[index]; throws Failure(HR_ERROR_INVALID_ARGUMENT) if the index is out of range.
template <typename T>
const T& at(const std::vector<T>& list, size_t index, const char* what) {
  if (index < list.size()) return list[index];
  throw Failure{HR_ERROR_INVALID_ARGUMENT, "index " + std::to_string(index) +
                                               " is out of range; there are " +
                                               std::to_string(list.size()) + " " + what + "."};
}

/// `value` as an enumerator; throws Failure(HR_ERROR_INVALID_ARGUMENT) unless it is 0 to `last`.
template <typename Enum>
Enum enum_from(int32_t value, Enum last, const char* name) {
  if (value >= 0 && value <= static_cast<int32_t>(last)) return static_cast<Enum>(value);
  throw Failure{HR_ERROR_INVALID_ARGUMENT, "'" + std::string(name) + "' is " +
                                               std::to_string(value) +
                                               "; use a constant of headroom/c.h, from 0 to " +
                                               std::to_string(static_cast<int32_t>(last)) + "."};
}

/// Views do not own: the caller's memory must outlive them. Names of parameters are copied.
TensorView view_from(const hr_tensor& tensor);
std::vector<TensorView> views_from(const hr_tensor* tensors, size_t count);
std::vector<Parameter> parameters_from(const hr_parameter* parameters, size_t count);
Device device_from(int32_t type, int32_t index);
StepOptions step_options_from(const hr_step_options* options);

hr_tensor c_tensor(const TensorView& view);
hr_stats c_stats(const GradStats& stats);
hr_report c_report(const StepReport& report);

}  // namespace headroom::c

#endif  // HEADROOM_ADAPTERS_C_STRUCTS_H_
