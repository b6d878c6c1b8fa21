#include <headroom/error.h>

#include "adapters/c/handles.h"
#include "adapters/c/structs.h"

using namespace headroom::c;
using headroom::AlarmReport;
using headroom::Error;
using headroom::ErrorCode;
using headroom::GradScaler;
using headroom::ScalerOptions;
using headroom::ScaleState;
using headroom::StepReport;

namespace {

hr_scaler_options default_options() {
  hr_scaler_options options = {};
  options.size = sizeof(options);
  options.enabled = 1;
  return options;
}

ScalerOptions options_from(const hr_scaler_options& given) {
  ScalerOptions options;
  options.enabled = given.enabled != 0;
  options.device = device_from(given.device_type, given.device_index);
  if (given.on_alarm == nullptr) return options;
  options.on_alarm = [tell = given.on_alarm, user = given.user](const AlarmReport& report) {
    const hr_alarm alarm = {sizeof(alarm),          static_cast<int32_t>(report.alarm),
                            report.scale,           report.skips_in_row,
                            report.culprit.c_str(), report.sentence.c_str()};
    call_and_catch(
        [&] { tell(&alarm, user); },
        [] {
          throw Failure{HR_ERROR_CALLBACK, "on_alarm left by an exception; let none out of it."};
        });
  };
  return options;
}

headroom::ScalePolicy policy_from(const char* text) {
  return text != nullptr ? headroom::parse_policy(text) : headroom::ScalePolicy{};
}

}  // namespace

hr_status hr_scaler_options_init(hr_scaler_options* options, size_t size) {
  return guarded(__func__, [&] {
    check_size<hr_scaler_options>(size, "options");
    give(default_options(), need(options, "options"), size);
  });
}

hr_status hr_step_options_init(hr_step_options* options, size_t size) {
  return guarded(__func__, [&] {
    check_size<hr_step_options>(size, "options");
    give(hr_step_options{}, need(options, "options"), size);
  });
}

hr_status hr_scaler_create(const char* policy, const hr_scaler_options* options,
                           hr_scaler** scaler) {
  return guarded(__func__, [&] {
    need(scaler, "scaler");
    auto entry = std::make_shared<ScalerEntry>();
    ScalerOptions taken_options = options_from(taken(options, default_options(), "options"));
    entry->device = taken_options.device;
    entry->object = std::make_unique<GradScaler>(policy_from(policy), std::move(taken_options));
    *scaler = scalers().add(std::move(entry));
  });
}

hr_status hr_scaler_destroy(hr_scaler* scaler) {
  return guarded(__func__, [&] {
    ScalerCall call(scaler);
    scalers().remove(scaler);
    call.entry().object.reset();
  });
}

hr_status hr_scaler_scale(hr_scaler* scaler, float loss, float* scaled) {
  return guarded(__func__, [&] {
    need(scaled, "scaled");
    *scaled = ScalerCall(scaler)->scale(loss);
  });
}

hr_status hr_scaler_scale_tensor(hr_scaler* scaler, const hr_tensor* loss,
                                 const hr_tensor* scaled) {
  return guarded(__func__, [&] {
    const auto from = view_from(*need(loss, "loss")), to = view_from(*need(scaled, "scaled"));
    ScalerCall(scaler)->scale(from, to);
  });
}

hr_status hr_scaler_unscale(hr_scaler* scaler, hr_optimizer* optimizer, hr_unscale_result* result) {
  return guarded(__func__, [&] {
    check_to_fill(result, "result");
    ScalerCall call(scaler, need(optimizer, "optimizer"));
    give(unscale_result_from(call->unscale_(call.optimizer())), result);
  });
}

hr_status hr_scaler_step(hr_scaler* scaler, hr_optimizer* optimizer, const hr_step_options* options,
                         hr_report* report) {
  return guarded(__func__, [&] {
    check_to_fill(report, "report");
    const headroom::StepOptions given = step_options_from(options);
    ScalerCall call(scaler, need(optimizer, "optimizer"));
    try {
      give(report_from(call->step(call.optimizer(), given)), report);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kOverflow) {
        give(report_from(call->report(call.optimizer())), report);
      }
      throw;
    }
  });
}

hr_status hr_scaler_update(hr_scaler* scaler) {
  return guarded(__func__, [&] { ScalerCall(scaler)->update(); });
}

hr_status hr_scaler_set_scale(hr_scaler* scaler, float scale) {
  return guarded(__func__, [&] { ScalerCall(scaler)->set_scale(scale); });
}

hr_status hr_scaler_retry(hr_scaler* scaler, int32_t* retry) {
  return guarded(__func__, [&] {
    need(retry, "retry");
    *retry = ScalerCall(scaler)->retry() ? 1 : 0;
  });
}

hr_status hr_scaler_device_scale(hr_scaler* scaler, const float** scale) {
  return guarded(__func__, [&] {
    need(scale, "scale");
    *scale = ScalerCall(scaler)->device_scale();
  });
}

hr_status hr_scaler_discard(hr_scaler* scaler) {
  return guarded(__func__, [&] { ScalerCall(scaler)->discard(); });
}

hr_status hr_scaler_report(hr_scaler* scaler, hr_optimizer* optimizer, hr_report* report) {
  return guarded(__func__, [&] {
    check_to_fill(need(report, "report"), "report");
    ScalerCall call(scaler, optimizer);
    give(report_from(optimizer != nullptr ? call->report(call.optimizer()) : call->report()),
         report);
  });
}

hr_status hr_scaler_try_report(hr_scaler* scaler, hr_optimizer* optimizer, hr_report* report) {
  return guarded(__func__, [&] {
    check_to_fill(need(report, "report"), "report");
    ScalerCall call(scaler, optimizer);
    StepReport nothing;
    nothing.pending = true;
    give(
        report_from((optimizer != nullptr ? call->try_report(call.optimizer()) : call->try_report())
                        .value_or(nothing)),
        report);
  });
}

hr_status hr_report_text(const hr_report* report, char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__, [&] {
    const hr_report given = taken(need(report, "report"), {}, "report");
    StepReport converted;
    converted.pending = given.pending != 0;
    converted.applied = given.applied != 0;
    converted.scale = given.scale;
    converted.grad_norm = given.grad_norm;
    converted.clip_factor = given.clip_factor;
    converted.culprit.assign(given.culprit_text,
                             strnlen(given.culprit_text, sizeof(given.culprit_text)));
    give_text(converted.to_string(), buffer, capacity, needed);
  });
}

hr_status hr_scaler_get_scale(hr_scaler* scaler, float* scale) {
  return guarded(__func__, [&] {
    need(scale, "scale");
    *scale = ScalerCall(scaler)->get_scale();
  });
}

hr_status hr_scaler_get_state(hr_scaler* scaler, hr_scale_state* state) {
  return guarded(__func__, [&] {
    check_to_fill(need(state, "state"), "state");
    const ScaleState now = ScalerCall(scaler)->state();
    give({sizeof(hr_scale_state), now.scale(), 0, now.steps(), now.skipped(), now.skips_in_row()},
         state);
  });
}

hr_status hr_scaler_get_policy(hr_scaler* scaler, char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__, [&] {
    give_text(to_string(ScalerCall(scaler)->policy()), buffer, capacity, needed);
  });
}

hr_status hr_scaler_set_policy(hr_scaler* scaler, const char* policy) {
  return guarded(__func__, [&] {
    const headroom::ScalePolicy parsed = headroom::parse_policy(need(policy, "policy"));
    ScalerCall(scaler)->set_policy(parsed);
  });
}

hr_status hr_scaler_enabled(hr_scaler* scaler, int32_t* enabled) {
  return guarded(__func__, [&] {
    need(enabled, "enabled");
    *enabled = ScalerCall(scaler)->enabled();
  });
}

hr_status hr_scaler_device(hr_scaler* scaler, int32_t* device_type, int32_t* device_index) {
  return guarded(__func__, [&] {
    need(device_type, "device_type");
    need(device_index, "device_index");
    ScalerCall call(scaler);
    *device_type = static_cast<int32_t>(call.entry().device.type);
    *device_index = call.entry().device.index;
  });
}

hr_status hr_scaler_save(hr_scaler* scaler, char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__,
                 [&] { give_text(ScalerCall(scaler)->save(), buffer, capacity, needed); });
}

hr_status hr_scaler_load(hr_scaler* scaler, const char* json) {
  return guarded(__func__, [&] {
    need(json, "json");
    ScalerCall(scaler)->load(json);
  });
}
