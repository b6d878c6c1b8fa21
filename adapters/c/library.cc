// The library itself, tensors, measuring, policies: all that needs no handle.
#include <headroom/runtime.h>
#include <headroom/tensor.h>

#include <algorithm>
#include <limits>

#include "adapters/c/structs.h"

using namespace headroom::c;

const char* hr_version(void) { return HEADROOM_VERSION; }

hr_status hr_check_version(int32_t major, int32_t minor) {
  return guarded(__func__, [&] {
    // Before 1.0 every minor version may change the interface; afterwards they only add to it.
    const bool served = major == HEADROOM_VERSION_MAJOR &&
                        (major == 0 ? minor == HEADROOM_VERSION_MINOR
                                    : minor >= 0 && minor <= HEADROOM_VERSION_MINOR);
    if (served) return;
    throw Failure{HR_ERROR_VERSION, "the program was compiled for Headroom " +
                                        std::to_string(major) + "." + std::to_string(minor) +
                                        " and this library is " HEADROOM_VERSION
                                        "; install the one that belongs to it."};
  });
}

hr_status hr_set_num_threads(int32_t threads) {
  return guarded(__func__, [&] { headroom::set_num_threads(threads); });
}

hr_status hr_num_threads(int32_t* threads) {
  return guarded(__func__, [&] { *need(threads, "threads") = headroom::num_threads(); });
}

hr_status hr_simd_target(char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__, [&] { give_text(headroom::simd_target(), buffer, capacity, needed); });
}

hr_status hr_set_simd_target(const char* name) {
  return guarded(__func__, [&] { headroom::set_simd_target(need(name, "name")); });
}

hr_status hr_cuda_available(int32_t* available) {
  return guarded(__func__, [&] { *need(available, "available") = headroom::cuda_available(); });
}

hr_status hr_convert(const hr_tensor* from, const hr_tensor* to) {
  return guarded(__func__, [&] {
    headroom::convert(view_from(*need(from, "from")), view_from(*need(to, "to")));
  });
}

hr_status hr_from_dlpack(const struct DLManagedTensor* managed, hr_tensor* tensor) {
  return guarded(__func__, [&] {
    need(tensor, "tensor");
    *tensor = tensor_from(headroom::from_dlpack(need(managed, "managed")));
  });
}

hr_status hr_to_dlpack(const hr_tensor* tensor, struct DLManagedTensor** managed) {
  return guarded(__func__, [&] {
    need(managed, "managed");
    *managed = headroom::to_dlpack(view_from(*need(tensor, "tensor")));
  });
}

hr_status hr_measure(const hr_tensor* tensors, size_t count, int32_t detail, hr_stats* stats) {
  return guarded(__func__, [&] {
    check_to_fill(need(stats, "stats"), "stats");
    headroom::GradDetail counts;
    const auto found =
        headroom::measure(views_from(tensors, count), detail != 0 ? &counts : nullptr);
    give(stats_from(found, counts), stats);
  });
}

hr_status hr_unscale(const hr_tensor* tensors, size_t count, float inverse_scale,
                     hr_unscale_result* result) {
  return guarded(__func__, [&] {
    check_to_fill(result, "result");
    give(unscale_result_from(headroom::unscale_(views_from(tensors, count), inverse_scale)),
         result);
  });
}

hr_status hr_policy_settings(const char* policy, char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__, [&] {
    const headroom::ScalePolicy parsed = headroom::parse_policy(need(policy, "policy"));
    give_text(to_string(parsed), buffer, capacity, needed);
  });
}

hr_status hr_preset_count(size_t* count) {
  return guarded(__func__, [&] { *need(count, "count") = headroom::presets().size(); });
}

hr_status hr_preset_info(size_t index, const char** name, const char** summary) {
  return guarded(__func__, [&] {
    need(name, "name");
    const headroom::PresetInfo& info = at(headroom::presets(), index, "presets");
    *name = info.name;
    if (summary != nullptr) *summary = info.summary;
  });
}
