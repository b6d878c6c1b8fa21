// Compiles the header as C11 with all warnings as errors. The sizes are part of the ABI: a struct
// may only grow, and its first size is then recorded in kFirstSize (structs.h).
#include <headroom/c.h>

#if UINTPTR_MAX == UINT64_MAX
_Static_assert(sizeof(hr_tensor) == 32, "hr_tensor never changes");
_Static_assert(sizeof(hr_parameter) == 72, "hr_parameter never changes");
_Static_assert(sizeof(hr_state_tensor) == 48, "hr_state_tensor never changes");
_Static_assert(sizeof(hr_stats) == 80, "hr_stats never changes");
_Static_assert(sizeof(hr_detail) == 2240, "hr_detail");
_Static_assert(sizeof(hr_fused_options) == 72, "hr_fused_options");
_Static_assert(sizeof(hr_precision) == 32, "hr_precision");
_Static_assert(sizeof(hr_optimizer_callbacks) == 32, "hr_optimizer_callbacks");
_Static_assert(sizeof(hr_optimizer_state) == 40, "hr_optimizer_state");
_Static_assert(sizeof(hr_alarm) == 40, "hr_alarm");
_Static_assert(sizeof(hr_scaler_options) == 40, "hr_scaler_options");
_Static_assert(sizeof(hr_step_options) == 32, "hr_step_options");
_Static_assert(sizeof(hr_report) == 392, "hr_report");
_Static_assert(sizeof(hr_scale_state) == 40, "hr_scale_state");
#endif

hr_status step_from_c(hr_report* report);

hr_status step_from_c(hr_report* report) {
  float weight = 1.0f, grad = 0.0f, scale = 0.0f;
  const hr_parameter parameter = {"w", hr_cpu_tensor(&weight, HR_F32, 1),
                                  hr_cpu_tensor(&grad, HR_F32, 1)};
  hr_optimizer* optimizer = NULL;
  hr_scaler* scaler = NULL;
  hr_status status = hr_fused_create(HR_ADAMW, &parameter, 1, NULL, NULL, &optimizer);
  if (status == HR_OK) status = hr_scaler_create(NULL, NULL, &scaler);
  if (status == HR_OK) status = hr_scaler_scale(scaler, 1.0f, &scale);
  grad = 0.5f * scale;
  if (status == HR_OK) status = hr_scaler_step(scaler, optimizer, NULL, report);
  if (status == HR_OK) status = hr_scaler_update(scaler);
  if (status == HR_OK) status = hr_scaler_destroy(scaler);
  if (status == HR_OK) status = hr_optimizer_destroy(optimizer);
  return status;
}
