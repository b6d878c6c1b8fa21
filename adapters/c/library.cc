// Functions of the C API that need no handle: the library, tensors, measuring, presets.
#include <headroom/runtime.h>
#include <headroom/tensor.h>

#include <algorithm>

#include "adapters/c/structs.h"

using namespace headroom::c;

const char* hr_version(void) { return HEADROOM_VERSION; }

hr_status hr_check_version(int32_t major, int32_t minor) {
  return guarded(__func__, [&] {
    // Before 1.0 every minor version may change the interface; afterwards they only add to it.
    const bool supported = major == HEADROOM_VERSION_MAJOR &&
                           (major == 0 ? minor == HEADROOM_VERSION_MINOR
                                       : minor >= 0 && minor <= HEADROOM_VERSION_MINOR);
    if (supported) return;
    throw Failure{HR_ERROR_VERSION, "the program was compiled for Headroom " +
                                        std::to_string(major) + "." + std::to_string(minor) +
                                        " and this library is " HEADROOM_VERSION
                                        "; install the matching version."};
  });
}

hr_status hr_set_num_threads(int32_t threads) {
  return guarded(__func__, [&] { headroom::set_num_threads(threads); });
}

hr_status hr_num_threads(int32_t* threads) {
  return guarded(__func__, [&] { *require(threads, "threads") = headroom::num_threads(); });
}

hr_status hr_simd_target(char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__, [&] { write_text(headroom::simd_target(), buffer, capacity, needed); });
}

hr_status hr_cuda_available(int32_t* available) {
  return guarded(__func__, [&] { *require(available, "available") = headroom::cuda_available(); });
}

hr_status hr_convert(const hr_tensor* from, const hr_tensor* to) {
  return guarded(__func__, [&] {
    headroom::convert(view_from(*require(from, "from")), view_from(*require(to, "to")));
  });
}

// The result is a view: `managed` is neither copied nor released.
hr_status hr_from_dlpack(const struct DLManagedTensor* managed, hr_tensor* tensor) {
  return guarded(__func__, [&] {
    require(tensor, "tensor");
    *tensor = c_tensor(headroom::from_dlpack(require(managed, "managed")));
  });
}

// The caller owns *managed and calls its deleter, which does not free the data.
hr_status hr_to_dlpack(const hr_tensor* tensor, struct DLManagedTensor** managed) {
  return guarded(__func__, [&] {
    require(managed, "managed");
    *managed = headroom::to_dlpack(view_from(*require(tensor, "tensor")));
  });
}

// Counting by magnitude costs time, so the core is asked for it only if `detail` is not null.
hr_status hr_measure(const hr_tensor* tensors, size_t count, hr_stats* stats, hr_detail* detail) {
  static_assert(HR_HISTOGRAM_BINS == headroom::GradDetail::kBins);
  static_assert(HR_HISTOGRAM_MIN_EXPONENT == headroom::GradDetail::kMinExponent);
  return guarded(__func__, [&] {
    require(stats, "stats");
    check_output(detail, "detail");
    headroom::GradDetail found;
    *stats = c_stats(
        headroom::measure(views_from(tensors, count), detail != nullptr ? &found : nullptr));
    hr_detail out = {0, found.zeros, found.subnormals, {}};
    std::copy(found.histogram.begin(), found.histogram.end(), out.histogram);
    write_struct(out, detail);
  });
}

hr_status hr_unscale(const hr_tensor* tensors, size_t count, float inverse_scale, hr_stats* stats) {
  return guarded(__func__, [&] {
    const auto found = headroom::unscale_(views_from(tensors, count), inverse_scale);
    if (stats != nullptr) *stats = c_stats(found);
  });
}

hr_status hr_preset_count(size_t* count) {
  return guarded(__func__, [&] { *require(count, "count") = headroom::presets().size(); });
}

hr_status hr_preset_info(size_t index, const char** name, const char** summary) {
  return guarded(__func__, [&] {
    require(name, "name");
    const headroom::PresetInfo& info = at(headroom::presets(), index, "presets");
    *name = info.name;
    if (summary != nullptr) *summary = info.summary;
  });
}
