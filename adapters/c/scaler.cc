// hr_scaler_*: calls of headroom::GradScaler with converted arguments. Every function locks the
// scaler and the optimizers it has stepped (ScalerCall). Output pointers are checked before the
// call has any effect.
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

// Zeros except `enabled`. write_struct() sets `size`.
hr_scaler_options default_options() {
  hr_scaler_options options = {};
  options.enabled = 1;
  return options;
}

// The alarm callback and its `user` pointer are copied; the strings of hr_alarm live until the
// callback returns. An exception of the callback becomes a status; update() is complete by then.
ScalerOptions options_from(const hr_scaler_options& given) {
  ScalerOptions options;
  options.enabled = given.enabled != 0;
  options.device = device_from(given.device_type, given.device_index);
  if (given.on_alarm == nullptr) return options;
  options.on_alarm = [callback = given.on_alarm, user = given.user](const AlarmReport& report) {
    const hr_alarm alarm = {sizeof(alarm),          static_cast<int32_t>(report.alarm),
                            report.scale,           report.skips_in_row,
                            report.culprit.c_str(), report.sentence.c_str()};
    call_and_catch([&] { callback(&alarm, user); },
                   [] {
                     throw Failure{HR_ERROR_CALLBACK, "the on_alarm callback threw."};
                   });
  };
  return options;
}

// Null is the default policy.
headroom::ScalePolicy policy_from(const char* text) {
  return text != nullptr ? headroom::parse_policy(text) : headroom::ScalePolicy{};
}

// Sets *out to read(scaler).
template <typename Out, typename Read>
hr_status get(const char* function, hr_scaler* scaler, Out* out, const char* name,
              const Read& read) {
  return guarded(function, [&] {
    require(out, name);
    ScalerCall call(scaler);
    *out = read(*call.entry().object);
  });
}

}  // namespace

hr_status hr_scaler_options_init(hr_scaler_options* options, size_t size) {
  return guarded(__func__, [&] { init_struct(options, size, default_options(), "options"); });
}

hr_status hr_step_options_init(hr_step_options* options, size_t size) {
  return guarded(__func__, [&] { init_struct(options, size, {}, "options"); });
}

hr_status hr_scaler_create(const char* policy, const hr_scaler_options* options,
                           hr_scaler** scaler) {
  return guarded(__func__, [&] {
    require(scaler, "scaler");
    auto entry = std::make_shared<ScalerEntry>();
    entry->object = std::make_unique<GradScaler>(
        policy_from(policy), options_from(read_struct(options, default_options(), "options")));
    *scaler = scalers().add(std::move(entry));
  });
}

// Removes the handle first, so that no new call finds it. Calls in other threads that already wait
// for the lock find a null object and return HR_ERROR_BAD_HANDLE.
hr_status hr_scaler_destroy(hr_scaler* scaler) {
  return guarded(__func__, [&] {
    ScalerCall call(scaler);
    scalers().remove(scaler);
    call.entry().object.reset();
  });
}

hr_status hr_scaler_scale(hr_scaler* scaler, float loss, float* scaled) {
  return get(__func__, scaler, scaled, "scaled", [&](GradScaler& s) { return s.scale(loss); });
}

// Enqueued on the thread's stream for CUDA tensors.
hr_status hr_scaler_scale_tensor(hr_scaler* scaler, const hr_tensor* loss,
                                 const hr_tensor* scaled) {
  return guarded(__func__, [&] {
    const auto from = view_from(*require(loss, "loss"));
    const auto to = view_from(*require(scaled, "scaled"));
    ScalerCall(scaler)->scale(from, to);
  });
}

hr_status hr_scaler_device_scale(hr_scaler* scaler, const float** scale) {
  return get(__func__, scaler, scale, "scale", [](GradScaler& s) { return s.device_scale(); });
}

hr_status hr_scaler_unscale(hr_scaler* scaler, hr_optimizer* optimizer, hr_stats* stats) {
  return guarded(__func__, [&] {
    ScalerCall call(scaler, require(optimizer, "optimizer"));
    const auto found = call->unscale_(call.optimizer());
    if (stats != nullptr) *stats = c_stats(found);
  });
}

hr_status hr_scaler_step(hr_scaler* scaler, hr_optimizer* optimizer, const hr_step_options* options,
                         hr_report* report) {
  return guarded(__func__, [&] {
    check_output(report, "report");
    const headroom::StepOptions given = step_options_from(options);
    ScalerCall call(scaler, require(optimizer, "optimizer"));
    try {
      write_struct(c_report(call->step(call.optimizer(), given)), report);
    } catch (const Error& error) {
      // With on_overflow=throw the step has been skipped, and C callers get its report as well.
      if (error.code() == ErrorCode::kOverflow) {
        write_struct(c_report(call->report(call.optimizer())), report);
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
  return get(__func__, scaler, retry, "retry", [](GradScaler& s) { return s.retry(); });
}

hr_status hr_scaler_discard(hr_scaler* scaler) {
  return guarded(__func__, [&] { ScalerCall(scaler)->discard(); });
}

// A null optimizer is allowed here: the last step of any optimizer is reported.
hr_status hr_scaler_report(hr_scaler* scaler, hr_optimizer* optimizer, hr_report* report) {
  return guarded(__func__, [&] {
    check_output(require(report, "report"), "report");
    ScalerCall call(scaler, optimizer);
    write_struct(c_report(optimizer != nullptr ? call->report(call.optimizer()) : call->report()),
                 report);
  });
}

// Where C++ returns no value, C gets a report that is pending.
hr_status hr_scaler_try_report(hr_scaler* scaler, hr_optimizer* optimizer, hr_report* report) {
  return guarded(__func__, [&] {
    check_output(require(report, "report"), "report");
    ScalerCall call(scaler, optimizer);
    const auto found =
        optimizer != nullptr ? call->try_report(call.optimizer()) : call->try_report();
    StepReport pending;
    pending.pending = true;
    write_struct(c_report(found.value_or(pending)), report);
  });
}

// Converts back the members that the text is made of.
hr_status hr_report_text(const hr_report* report, char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__, [&] {
    const hr_report given = read_struct(require(report, "report"), {}, "report");
    StepReport converted;
    converted.pending = given.pending != 0;
    converted.applied = given.applied != 0;
    converted.skip = enum_from(given.skip, headroom::Skip::kNormTooLarge, "skip");
    converted.scale = given.scale;
    converted.grad_norm = given.grad_norm;
    converted.clip_factor = given.clip_factor;
    converted.culprit.assign(given.culprit_text,
                             strnlen(given.culprit_text, sizeof(given.culprit_text)));
    write_text(converted.to_string(), buffer, capacity, needed);
  });
}

hr_status hr_scaler_get_scale(hr_scaler* scaler, float* scale) {
  return get(__func__, scaler, scale, "scale", [](GradScaler& s) { return s.get_scale(); });
}

hr_status hr_scaler_get_state(hr_scaler* scaler, hr_scale_state* state) {
  return guarded(__func__, [&] {
    check_output(require(state, "state"), "state");
    const ScaleState now = ScalerCall(scaler)->state();
    write_struct({0, now.scale(), 0, now.steps(), now.skipped(), now.skips_in_row()}, state);
  });
}

hr_status hr_scaler_get_policy(hr_scaler* scaler, char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__, [&] {
    write_text(to_string(ScalerCall(scaler)->policy()), buffer, capacity, needed);
  });
}

// The text is parsed before the scaler is locked; an invalid one changes nothing.
hr_status hr_scaler_set_policy(hr_scaler* scaler, const char* policy) {
  return guarded(__func__, [&] {
    const headroom::ScalePolicy parsed = headroom::parse_policy(require(policy, "policy"));
    ScalerCall(scaler)->set_policy(parsed);
  });
}

hr_status hr_scaler_save(hr_scaler* scaler, char* buffer, size_t capacity, size_t* needed) {
  return guarded(__func__,
                 [&] { write_text(ScalerCall(scaler)->save(), buffer, capacity, needed); });
}

hr_status hr_scaler_load(hr_scaler* scaler, const char* json) {
  return guarded(__func__, [&] {
    require(json, "json");
    ScalerCall(scaler)->load(json);
  });
}
